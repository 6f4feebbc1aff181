"""Tokens and text: the tokenizer with its vocabulary, and text out of tokens as they come."""
