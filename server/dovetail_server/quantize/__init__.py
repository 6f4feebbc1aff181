"""Writes checkpoints in fewer bits: what `dovetail quantize` does."""
