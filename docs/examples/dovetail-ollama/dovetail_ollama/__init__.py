"""Ollama's API for Dovetail: `request.py` reads bodies, `reply.py` writes replies and names the routes."""
