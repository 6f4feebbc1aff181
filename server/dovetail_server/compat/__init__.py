"""Names that SGLang and vLLM know and Dovetail does not implement: what each means here, one file per surface."""
