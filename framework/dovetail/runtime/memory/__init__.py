"""What fits into memory: the plan of weights, pages and graphs, its table, and what the host has."""
