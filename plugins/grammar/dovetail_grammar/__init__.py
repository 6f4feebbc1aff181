"""Built-in grammar backends, registered by entry point."""
