"""The conformance kit: one class per kind of plugin, run by pytest on built-ins and on anybody's plugin alike."""
