"""What an author builds with. Like the contracts it is public, and it stands on nothing else of the core."""
