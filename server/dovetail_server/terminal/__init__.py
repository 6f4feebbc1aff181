"""A server from a terminal: `dovetail chat` and `dovetail top`."""
