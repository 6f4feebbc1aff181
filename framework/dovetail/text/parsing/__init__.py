"""A reply as it comes: parsers fitted to the chat template, and the stream that the server reads."""
