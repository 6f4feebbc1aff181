"""What log probabilities in the words of each API have in common."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.contracts.output import TokenizerView
from dovetail.messages import TokenLogprob
from dovetail_server.schema.common import PromptLogprob, PromptLogprobs

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def finite(value: float | None) -> float:
    """Return a log probability that JSON can carry."""
    return FLOOR if value is None or not value > FLOOR else value


def named(token_id: int, raw: bytes, as_ids: bool) -> str:
    """Return how a token is named: by its text, or by its id."""
    return f"token_id:{token_id}" if as_ids else text(raw)


def text(raw: bytes) -> str:
    """Return a token's text; a cut character becomes U+FFFD."""
    return raw.decode(errors="replace")


def prompt_logprobs(rows: Sequence[TokenLogprob], tokenizer: TokenizerView) -> PromptLogprobs:
    """Write rows as `prompt_logprobs`: per position the candidates by token id, null for the first token."""
    result: PromptLogprobs = []
    for row in rows:
        if row.logprob is None:
            result.append(None)
            continue
        ranks = {c.token_id: i + 1 for i, c in enumerate(row.top)}
        entry = {row.token_id: row.logprob} | {c.token_id: c.logprob for c in (*row.top, *row.named)}
        result.append(
            {
                str(i): PromptLogprob(finite(value), ranks.get(i), text(tokenizer.token_bytes(i)))
                for i, value in entry.items()
            }
        )
    return result
