"""Forms of packed weights, and what converts a checkpoint's tensors into them."""
