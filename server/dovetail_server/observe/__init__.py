"""What is told of requests: observers, metrics, logs."""
