"""A server's start, its life and its end."""
