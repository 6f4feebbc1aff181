"""Conversations into prompts: the model's chat template, in a sandbox, and what it is given."""
