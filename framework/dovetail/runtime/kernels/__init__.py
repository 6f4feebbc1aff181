"""Triton kernels compiled ahead: what an engine will launch is collected, and compiled in processes of their own."""
