"""What is odd about a tokenizer and the defaults beside it, in sentences: for the log of a start."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.processing.bounds import BOUNDS, POSITIVE, is_within
from dovetail.text.tokenizer.tokenizer import Tokenizer


def oddities(tokenizer: Tokenizer, rows: int, *, generates: bool) -> Iterator[str]:
    """Yield what is odd, and served all the same.

    Args:
        tokenizer: The model's.
        rows: Of the model's embedding.
        generates: Whether the model writes replies, which something has to end.
    """
    if tokenizer.vocab_size > rows:
        yield _too_many(tokenizer, rows)
    if not generates:
        return
    yield from tokenizer.odd_ends
    ends = [token_id for token_id in tokenizer.eos_token_ids if token_id < rows]
    for token_id in set(tokenizer.eos_token_ids) - set(ends):
        last = rows - 1
        yield f"eos_token_id {token_id}: the model has tokens up to {last:,}, no reply ends at it; correct the file."
    if not ends:
        yield (
            "No token ends a reply: replies run on to max_tokens. Set eos_token_id in config.json, or eos_token in "
            "tokenizer_config.json."
        )
    for name, value in tokenizer.default_sampling.items():
        if not is_within(name, value):
            low, high = BOUNDS[name]
            least = f"above {low:,}" if name in POSITIVE else f"from {low:,}"
            yield f"generation_config.json: {name} is {value}; it must be {least} to {high:,}: it is left out."


def usable_defaults(tokenizer: Tokenizer) -> dict[str, float | int]:
    """Return the sampling defaults that a request could give, too; `oddities` tells of the others."""
    return {name: value for name, value in tokenizer.default_sampling.items() if is_within(name, value)}


def _too_many(tokenizer: Tokenizer, rows: int) -> str:
    names = [repr(token) for token, token_id in tokenizer.added_tokens.items() if token_id >= rows]
    such = f", such as {', '.join(names[:3])}" if names else ""
    return (
        f"The tokenizer has {tokenizer.vocab_size:,} tokens and the model embeddings of {rows:,}: requests whose text "
        f"needs one of the others{such}, are refused. Does the tokenizer belong to this model?"
    )
