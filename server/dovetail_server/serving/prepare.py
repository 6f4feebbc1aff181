"""Where a request is prepared: at once if that is quick, else in a worker thread.

Preparing is checking, rendering a template and tokenizing. A thread keeps the event loop free, and costs a short
request a quarter of all processor time that the server spends on it, so short ones do without. A checkpoint's template
that takes long for a short one is stopped, and the request prepared by another process (`bodies/request.py`).
"""

from __future__ import annotations

from pydantic import BaseModel

TEXT_BYTES = 2048
"""Bodies up to this size are quick: tokenizing so much takes less than a millisecond."""
IDS_BYTES = 1 << 15
"""The same where the prompt is a list of ids, which are only checked."""
MAX_CHOICES = 8
QUICK = frozenset((
    "model", "prompt", "messages", "system", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "n", "seed", "stop", "stop_sequences", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "logprobs", "top_logprobs", "echo", "return_token_ids", "priority", "cache_salt", "rid",
    "request_id", "user", "metadata", "store", "service_tier", "reasoning_effort", "separate_reasoning",
    "stream_reasoning", "chat_template_kwargs",
))  # fmt: skip
"""Fields that a quick request may have. Grammars, tools, expressions and whatever is new may take longer."""


def is_quick(body: BaseModel, num_bytes: int) -> bool:
    """Whether preparing a body of so many bytes cannot hold others up."""
    if not body.model_fields_set <= QUICK or (getattr(body, "n", None) or 1) > MAX_CHOICES:
        return False
    prompt = getattr(body, "prompt", None)
    has_ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    return num_bytes <= (IDS_BYTES if has_ids else TEXT_BYTES)
