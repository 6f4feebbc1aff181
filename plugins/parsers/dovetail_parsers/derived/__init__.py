"""A format that is no plugin of its own: read off the chat template, or told by `response_template`."""
