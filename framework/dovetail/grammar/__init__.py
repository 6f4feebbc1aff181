"""Structured output: what a request's text must match, compiled where it can be killed, enforced token by token.

The API side reads the request (`fields`), checks it (`limits`), chooses how to enforce it (`route`) and judges the
finished text where enforcement was not full (`validate`). The engine side compiles (`service`, `pool`, `child`), keeps
what is compiled (`cache`), follows each request (`gate`, `constraint`) and masks the logits (`masks`, `mask_ops`).

Importing the package imports neither torch nor a backend.
"""
