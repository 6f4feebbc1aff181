"""The server: command line, HTTP routes, OpenAI schemas."""
