"""Large bodies: parsed, checked, rendered and tokenized by processes that can be killed."""
