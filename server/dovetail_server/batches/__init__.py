"""Batches: many requests from a file, run beside interactive ones, and none lost or answered twice."""
