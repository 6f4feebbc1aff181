"""A start in phases: check, load, plan, allocate, compile, capture. Each takes what the one before has returned."""
