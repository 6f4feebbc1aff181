"""`/v1/score`."""
