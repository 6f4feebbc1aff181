"""A model's folder: its files, tensors and their sizes, where they go, and how they are quantised."""
