"""How tokens are chosen, and what is told of them."""

from __future__ import annotations

from typing import Any

import msgspec

from dovetail.contracts.config import Pool
from dovetail.contracts.replies import TokenLogprob, TopLogprob

__all__ = ["Pool", "SamplerParams", "TokenLogprob", "TopLogprob"]


class SamplerParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. Values are checked by whoever accepts them from outside; the engine trusts them.

    Stop *strings* are not here: they are matched on decoded content by the output processor, which then aborts.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: the client chooses one."""
    logprobs: int | None = None
    """None: none; n: the chosen token's log probability and those of the n most likely tokens."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the prompt's tokens."""
    prompt_logprobs_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose log probabilities go with each of those that `logprobs` and `prompt_logprobs` ask for."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Tokens, or several in a row, that are never said."""
    processors: dict[str, dict[str, Any]] = {}
    """Logits processors that it asks for, and what it says to each: complete, checked, plain values."""

    @property
    def is_penalized(self) -> bool:
        """Whether tokens have to be counted."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on what was said before it in other ways than through the model."""
        return self.is_penalized or bool(self.processors)
