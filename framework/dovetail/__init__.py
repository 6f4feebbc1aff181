"""Dovetail: an LLM server whose every part is a plugin."""

__version__ = "0.1.0"
