"""What the server, batches and `LLM` do alike before a request reaches an engine."""
