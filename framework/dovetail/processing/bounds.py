"""Least and most that the numbers and texts of a request may be, in a body and in `dovetail.SamplingParams` alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

MAX_TOKENS, MAX_TOKEN_ID = 1 << 30, (1 << 31) - 1
MAX_STOPS, MAX_STOP_CHARS = 32, 4096
"""Stop strings of a request, or stop expressions, and characters of each."""
MAX_STOP_IDS, MAX_NAMED_IDS, MAX_ALLOWED_IDS, MAX_BAD_WORDS = 256, 4096, 1 << 20, 1024
MAX_BIASES, MAX_SALT = 1 << 16, 512
RID = re.compile(r"[\x21-\x7e]{1,256}")
"""A client's identifier of a request."""
BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, MAX_TOKEN_ID),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0, 2),
    "min_tokens": (0, MAX_TOKENS),
    "max_tokens": (0, MAX_TOKENS),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "logprobs": (-1, MAX_TOKEN_ID),
    "prompt_logprobs": (-1, MAX_TOKEN_ID),
    "thinking_budget": (0, MAX_TOKENS),
}
POSITIVE = frozenset(("repetition_penalty",))
"""The least itself is too little for these."""


def is_within(name: str, value: float, bounds: Mapping[str, tuple[float, float]] = BOUNDS) -> bool:
    """Whether a number is possible; what is none (NaN) never is."""
    least, most = bounds[name]
    return least <= value <= most and not (value == least and name in POSITIVE)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Of thinking."""
TOOL_NAME, MAX_TOOL_NAME = r"^[A-Za-z0-9_.:\-]+$", 256
