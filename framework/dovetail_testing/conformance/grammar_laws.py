"""Walking through a grammar with a matcher, and what must hold at every state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts.grammar import GrammarMatcher, Vocabulary
from dovetail_testing.checks import check, fail, no_error, raised
from dovetail_testing.conformance.grammar_samples import longest

Bits = NDArray[np.bool_]


def allowed(matcher: GrammarMatcher, vocabulary: Vocabulary) -> Bits:
    """Return which tokens a matcher allows next, `[V]`, and check that it wrote its row in full and no other."""
    words = vocabulary.mask_words
    mask = np.random.default_rng(7).integers(-(2**31), 2**31, (3, words), dtype=np.int32)
    before = mask.copy()
    with no_error("fill", "; matchers never raise"):
        is_written = matcher.fill(mask, 1)
    check(bool((mask[[0, 2]] == before[[0, 2]]).all()), "fill writes to other rows of the mask than its own")
    if not is_written:
        check(bool((mask[1] == before[1]).all()), "fill returned False (everything is allowed) and wrote a row")
        return np.ones(vocabulary.size, dtype=np.bool_)
    bits = np.unpackbits(mask[1].view(np.uint8), bitorder="little").astype(np.bool_)
    return bits[: vocabulary.size]


def accept(matcher: GrammarMatcher, token_ids: Sequence[int]) -> int:
    """Call `accept`; an exception fails the test."""
    try:
        return matcher.accept(token_ids)
    except Exception as error:  # a stranger's matcher; the message says what it did
        fail(f"accept({list(token_ids)}) raised {raised(error)}; matchers never raise")


def rollback(matcher: GrammarMatcher, num_tokens: int) -> None:
    """Call `rollback`; an exception fails the test."""
    with no_error(f"rollback({num_tokens})", "; matchers never raise"):
        matcher.rollback(num_tokens)


def token_name(vocabulary: Vocabulary, token_id: int) -> str:
    """Show a token."""
    if token_id in vocabulary.eos_ids:
        return f"{token_id} (an end token)"
    if token_id in vocabulary.special_ids or token_id >= len(vocabulary.tokens) or not vocabulary.tokens[token_id]:
        return f"{token_id} (stands for no text)"
    return f"{token_id} ({vocabulary.tokens[token_id]!r})"


@dataclass(slots=True)
class Walk:
    """A random walk: tokens taken, and what was allowed before each and at the end."""

    tokens: list[int] = field(default_factory=list)
    masks: list[Bits] = field(default_factory=list)


def random_walk(matcher: GrammarMatcher, vocabulary: Vocabulary, rng: random.Random, length: int = 10) -> Walk:
    """Advance a matcher by allowed tokens that carry text."""
    walk = Walk(masks=[allowed(matcher, vocabulary)])
    for _ in range(length):
        choices = [int(i) for i in np.flatnonzero(walk.masks[-1]) if _is_text(vocabulary, int(i))]
        if not choices:
            break
        token = rng.choice(choices)
        taken = accept(matcher, [token])
        if taken != 1:
            where = f"after {text_of(vocabulary, walk.tokens)!r}"
            compare_masks(walk.masks[-1], brute_force(matcher, vocabulary), vocabulary, where)
            fail(f"the mask allows token {token_name(vocabulary, token)}, which accept refuses {where}")
        walk.tokens.append(token)
        walk.masks.append(allowed(matcher, vocabulary))
    return walk


def _is_text(vocabulary: Vocabulary, token_id: int) -> bool:
    in_range = token_id < len(vocabulary.tokens) and token_id not in vocabulary.special_ids
    return in_range and bool(vocabulary.tokens[token_id])


def text_of(vocabulary: Vocabulary, tokens: Sequence[int]) -> bytes:
    """Return the bytes of tokens."""
    return b"".join(vocabulary.tokens[token] for token in tokens)


def encodings(vocabulary: Vocabulary, text: str) -> list[list[int]]:
    """Tokenize a text in two ways: byte by byte, and by the longest token at each place."""
    return [list(text.encode()), longest(vocabulary.tokens, text)]


def is_forced(mask: Bits, matcher: GrammarMatcher) -> bool:
    """Whether the mask holds one token, and that one is forced: other ways to write the same text may be left out."""
    forced = list(matcher.forced())
    return bool(forced) and int(mask.sum()) == 1 and bool(mask[forced[0]])


def brute_force(matcher: GrammarMatcher, vocabulary: Vocabulary) -> Bits:
    """Return which tokens `accept` takes, each tried on a fork of its own."""
    return np.array([accept(matcher.fork(), [token]) == 1 for token in range(vocabulary.size)], dtype=np.bool_)


def compare_masks(mask: Bits, tried: Bits, vocabulary: Vocabulary, where: str) -> None:
    """Fail with the first difference between a mask and what `accept` takes."""
    if bool((mask == tried).all()):
        return
    for shift, side in ((1, "below"), (-1, "above")):
        if bool((np.roll(mask, shift)[2:-2] == tried[2:-2]).all()):
            fail(f"the mask is off by one: each bit stands one {side} its place {where}")
    wrong = int(np.flatnonzero(mask != tried)[0])
    name, count = token_name(vocabulary, wrong), int((mask != tried).sum())
    if tried[wrong]:
        fail(f"accept takes a banned token: {name} is not in the mask ({count} tokens differ) {where}")
    fail(f"the mask allows token {name}, which accept refuses ({count} tokens differ) {where}")


def check_ends(mask: Bits, matcher: GrammarMatcher, vocabulary: Vocabulary, where: str) -> None:
    """Check that end tokens are allowed exactly where the text is complete, and other silent tokens never."""
    for eos in sorted(vocabulary.eos_ids):
        if bool(mask[eos]) != matcher.accepting:
            verb = "is not allowed although" if matcher.accepting else "is allowed although not"
            fail(f"the end token {eos} {verb} the text so far is complete {where}")
    silent = [i for i in range(vocabulary.size) if not _is_text(vocabulary, i) and i not in vocabulary.eos_ids]
    for token in silent:
        check(not mask[token], f"the mask allows token {token_name(vocabulary, token)} {where}")


def state_of(matcher: GrammarMatcher, vocabulary: Vocabulary) -> tuple[Any, ...]:
    """Return what can be seen of a matcher's state."""
    return allowed(matcher, vocabulary).tobytes(), matcher.terminated, matcher.accepting
