"""A reply as it comes: markers, regions, stop strings and expressions, and the stream that the server reads."""
