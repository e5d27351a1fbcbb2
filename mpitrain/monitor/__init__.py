"""What a running job prints and records: console, metrics, TensorBoard, trace, heartbeat."""
