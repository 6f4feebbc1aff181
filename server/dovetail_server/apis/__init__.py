"""APIs: each route is two files, `request.py` from a body to a `Request` and `reply.py` from its steps to bytes."""
