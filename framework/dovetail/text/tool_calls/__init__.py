"""Calls of tools in their formats: reading them, and the grammar that describes them."""
