"""Reasoning parsers, one file per name."""
