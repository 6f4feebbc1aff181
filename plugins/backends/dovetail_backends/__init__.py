"""Built-in attention backends, registered by entry point."""
