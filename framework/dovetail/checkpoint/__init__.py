"""What the files of a checkpoint say, read without torch and without a tokenizer."""
