"""An engine put together, in this process or in one of its own."""
