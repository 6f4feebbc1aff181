"""Grammars made ready in processes that may be killed, and finished texts judged."""
