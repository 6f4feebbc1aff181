"""`LLM`: a model in this process, without a server."""
