"""Built-in reasoning and tool-call parsers: each file bears the name typed on the command line."""
