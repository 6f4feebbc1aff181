"""`/v1/embeddings`."""
