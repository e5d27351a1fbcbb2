"""What a live run prints and records: console, metrics, TensorBoard, trace, heartbeat."""
