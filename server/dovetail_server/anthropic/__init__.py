"""The Anthropic Messages API: schemas, translation, events and errors."""
