"""Errors that clients see."""
