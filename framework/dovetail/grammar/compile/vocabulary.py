"""The `Vocabulary` of a model, from its tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from dovetail.contracts.grammar import Vocabulary
from dovetail.text.tokenizer.tokenizer import Tokenizer


def make_vocabulary(
    tokenizer: Tokenizer, size: int, eos_ids: Iterable[int], known: Sequence[bytes] | None = None
) -> Vocabulary:
    """Collect what grammars need to know of a tokenizer.

    Added tokens that are no mere whitespace never match text: in a reply they are markers, which parsers recognise by
    their id. A text can still spell them in other tokens.

    Args:
        tokenizer: The model's.
        size: The logits' width; ids beyond the tokenizer's stand for no text.
        eos_ids: Ids that end a reply.
        known: What `token_bytes` returns of the tokenizer, where it is at hand.
    """
    ends = frozenset(i for i in eos_ids if i < size)
    added = {text: token_id for text, token_id in tokenizer.added_tokens.items() if text.strip() and token_id < size}
    special = frozenset(added.values()) | {i for i in tokenizer.special_ids if i < size} | ends
    num = min(tokenizer.vocab_size, size)
    tokens = list((known or token_bytes(tokenizer))[:num])
    for i in special:
        if i < num:
            tokens[i] = b""
    facts = tokens, size, sorted(ends), sorted(special), sorted(added.items())
    digest = hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=16)

    return Vocabulary(
        tokens=tokens,
        size=size,
        eos_ids=ends,
        special_ids=special,
        fingerprint=digest.hexdigest(),
        added=added,
        encode=tokenizer.encode_written if tokenizer.inline_chars else None,
    )


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return what each id of a tokenizer stands for."""
    return [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
