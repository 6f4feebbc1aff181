"""HTTP routes, one file per family."""
