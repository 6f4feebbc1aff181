"""The native API: `/generate` and the tokenizer endpoints."""
