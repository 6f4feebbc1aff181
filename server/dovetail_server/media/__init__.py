"""Images of requests: from what a client wrote to bytes, and from bytes to pixels. No address is trusted."""
