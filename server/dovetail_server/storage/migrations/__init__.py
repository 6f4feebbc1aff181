"""Migrations of the database, applied when it is opened."""
