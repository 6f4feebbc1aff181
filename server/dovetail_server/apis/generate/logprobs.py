"""Log probabilities in the words of `/generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.messages import TokenLogprob
from dovetail_server.apis.generate.schema import TokenRow
from dovetail_server.apis.logprobs import finite

TextOf = Callable[[int], str]


def native_rows(rows: Sequence[TokenLogprob], text_of: TextOf | None) -> list[TokenRow]:
    """Write rows as `[logprob, token_id, text or null]`."""
    return [
        (None if r.logprob is None else finite(r.logprob), r.token_id, text_of(r.token_id) if text_of else None)
        for r in rows
    ]


def native_top(rows: Sequence[TokenLogprob], num_top: int, text_of: TextOf | None) -> list[list[TokenRow] | None]:
    """Write the rivals of each row."""
    return [
        None
        if row.logprob is None
        else [(finite(c.logprob), c.token_id, text_of(c.token_id) if text_of else None) for c in row.top[:num_top]]
        for row in rows
    ]


def native_named(rows: Sequence[TokenLogprob], text_of: TextOf | None) -> list[list[TokenRow] | None]:
    """Write the tokens of each row that the request names."""
    return [
        None
        if row.logprob is None
        else [(finite(c.logprob), c.token_id, text_of(c.token_id) if text_of else None) for c in row.named]
        for row in rows
    ]
