"""Text in, text out: tokenizer, chat templates, detokenizer, output parser. Nothing here imports torch."""
