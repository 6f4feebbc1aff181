"""A model's format, found in its chat template: which parsers read it, and what they take from it."""
