"""Triton's kernels, whosever they are, compiled before requests wait for them: see `compiler`."""
