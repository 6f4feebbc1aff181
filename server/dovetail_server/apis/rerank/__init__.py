"""`/v1/rerank`."""
