"""Structured output: what a request's text must match, compiled where it can be killed, enforced token by token.

The API side reads the request, checks it and chooses how to enforce it (`spec`), and judges the finished text where
enforcement was not full (`structured_outputs`). The engine side compiles and keeps what is compiled (`compile`), and
follows each request (`matching`); `runtime` masks the logits.

Importing the package imports neither torch nor a backend.
"""
