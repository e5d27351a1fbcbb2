"""The output and records of a running job: console, metrics, TensorBoard, trace, heartbeat."""
