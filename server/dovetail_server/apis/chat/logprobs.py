"""Log probabilities in the words of the chat API."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.contracts.output import TokenizerView
from dovetail.messages import TokenLogprob
from dovetail_server.apis.chat.schema import TokenAlternative, TokenInfo
from dovetail_server.apis.logprobs import finite, named


def chat_logprobs(
    rows: Sequence[TokenLogprob], num_top: int, tokenizer: TokenizerView, *, as_ids: bool = False
) -> list[TokenInfo]:
    """Write rows as `choices[].logprobs.content`; with `as_ids` tokens are named by their ids."""
    result = []
    for row in rows:
        raw = tokenizer.token_bytes(row.token_id)
        top = []
        for candidate in (*row.top[:num_top], *row.named):
            data = tokenizer.token_bytes(candidate.token_id)
            top.append(TokenAlternative(named(candidate.token_id, data, as_ids), finite(candidate.logprob), list(data)))
        result.append(TokenInfo(named(row.token_id, raw, as_ids), finite(row.logprob), list(raw), top))
    return result
