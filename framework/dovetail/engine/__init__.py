"""The engine: requests, scheduling, the loop, and the client that reaches it."""
