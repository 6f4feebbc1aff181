"""Token by token: what may come next, as bits over the vocabulary."""
