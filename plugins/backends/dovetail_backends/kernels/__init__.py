"""Built-in sets of kernels: one folder each."""
