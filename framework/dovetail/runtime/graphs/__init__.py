"""Steps that are recorded once and replayed, and what they read."""
