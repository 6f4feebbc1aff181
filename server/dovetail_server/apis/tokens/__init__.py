"""`/tokenize` and `/detokenize`."""
