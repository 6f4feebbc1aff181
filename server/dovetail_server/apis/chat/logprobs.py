"""Log probabilities in the words of the chat API."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from dovetail.contracts.output import TokenizerView
from dovetail.contracts.replies import TopLogprob
from dovetail.messages import TokenLogprob
from dovetail_server.apis.chat.schema import TokenAlternative, TokenInfo
from dovetail_server.apis.logprobs import FLOOR, finite, named

MAX_KEPT = 1 << 15
"""Tokens whose bytes in JSON are kept: a hundred bytes or two each."""
encode = msgspec.json.Encoder().encode


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


class LogprobBytes:
    """Writes `choices[].logprobs` of a stream's chunks: the bytes of `chat_logprobs`, in less time.

    Six tokens or so stand in each chunk, and all of a token but its number is the same each time.
    """

    def __init__(self, tokenizer: TokenizerView, *, as_ids: bool) -> None:
        """Hold no token yet; with `as_ids` tokens are named by their ids."""
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._kept: dict[int, bytes] = {}

    def __call__(self, rows: Sequence[TokenLogprob], num_top: int) -> bytes:
        """Write the rows of a chunk, at least one."""
        kept, keep = self._kept, self._keep
        forms: list[bytes] = []
        values: list[float | None] = []
        for row in rows:
            group: list[TokenLogprob | TopLogprob] = [row, *row.top[:num_top], *row.named]
            values += [each.logprob for each in group]
            first, *others = [kept.get(each.token_id) or keep(each.token_id) for each in group]
            forms.append(first + b',"top_logprobs":[' + (b"},".join(others) + b"}" if others else b"") + b"]}")
        # One call for all numbers, which writes each as it would alone.
        numbers = encode([FLOOR if value is None or not value > FLOOR else value for value in values])
        return b'{"content":[' + b",".join(forms) % tuple(numbers[1:-1].split(b",")) + b'],"refusal":null}'

    def _keep(self, token_id: int) -> bytes:
        """Return a token in JSON, with `%b` for its number and without the closing brace."""
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        raw = self._tokenizer.token_bytes(token_id)
        name = encode(named(token_id, raw, self._as_ids)).replace(b"%", b"%%")
        found = self._kept[token_id] = b'{"token":' + name + b',"logprob":%b,"bytes":' + encode(list(raw))
        return found


@lru_cache(4)
def logprob_bytes(tokenizer: TokenizerView, as_ids: bool) -> LogprobBytes:
    """Return the writer that all streams of a tokenizer share."""
    return LogprobBytes(tokenizer, as_ids=as_ids)
