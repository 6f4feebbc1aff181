"""`--plugin otel`: traces for OpenTelemetry. `spans.py` makes them of what the server tells, `export.py` sends them."""
