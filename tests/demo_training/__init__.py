"""How the bundled demo model is made: a generated corpus, a tokenizer, a trainer and an evaluation."""
