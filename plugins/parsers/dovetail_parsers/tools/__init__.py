"""Tool-call parsers, one file per name."""
