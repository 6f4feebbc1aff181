"""Tensor operations behind the layers: the torch reference, and faster versions beside it."""
