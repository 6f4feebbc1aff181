"""Structured output: what a request's text must match, compiled where it can be killed, enforced token by token.

`pipeline` tells the way of a schema in six steps, from the request to the report. Importing the package imports neither
torch nor a backend.
"""
