"""From logits to tokens: masks, penalties, processors, draws and log probabilities."""
