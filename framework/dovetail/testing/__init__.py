"""What tests need, ours and third parties': tiny models with random weights, made in a second."""
