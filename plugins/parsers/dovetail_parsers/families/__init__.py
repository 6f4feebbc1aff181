"""Readers of calls that several formats share: one file a family. What a format adds of its own stands in `tools/`."""
