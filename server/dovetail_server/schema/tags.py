"""The tags of routes: which API each belongs to."""

from __future__ import annotations

OPENAI, MESSAGES = "openai", "messages"
TAGS = {"openai": (OPENAI, "responses"), "anthropic": (MESSAGES,), "sglang": ("native",)}
"""Of each built-in API, the tags of its routes."""
