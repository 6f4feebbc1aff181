"""Reasoning parsers: rows of markers, and the few that look at the template or the request."""
