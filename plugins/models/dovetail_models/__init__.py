"""Built-in model architectures, one file each, registered by entry point."""
