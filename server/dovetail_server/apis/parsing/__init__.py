"""`/separate_reasoning` and `/parse_function_call`."""
