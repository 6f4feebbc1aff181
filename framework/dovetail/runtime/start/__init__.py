"""A start in phases: check, load, plan, allocate, compile, probe, capture. Each takes what those before returned."""
