"""Which attention backend serves which layers and steps."""
