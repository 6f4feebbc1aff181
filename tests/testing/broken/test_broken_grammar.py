"""Grammar backends with one fault each, and a right one: the kit passes the one and names the others' faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import (
    GrammarBackend,
    GrammarLimits,
    GrammarSpec,
    Kind,
    Support,
    SupportLevel,
    Vocabulary,
)
from dovetail_testing import check_class, conformance_class

Mask = np.ndarray[Any, np.dtype[np.int32]]


class Matcher:
    """Follows the texts of a finite language, byte by byte."""

    error: str | None = None

    def __init__(self, texts: Sequence[bytes], vocabulary: Vocabulary) -> None:
        self.texts, self.vocabulary = texts, vocabulary
        self.steps: list[int] = []

    @property
    def text(self) -> bytes:
        tokens = self.vocabulary.tokens
        return b"".join(tokens[t] for t in self.steps if t not in self.vocabulary.eos_ids)

    @property
    def terminated(self) -> bool:
        return bool(self.steps) and self.steps[-1] in self.vocabulary.eos_ids

    @property
    def accepting(self) -> bool:
        return self.text in self.texts

    def allows(self, token: int) -> bool:
        if self.terminated or not 0 <= token < len(self.vocabulary.tokens):
            return False
        if token in self.vocabulary.eos_ids:
            return self.accepting
        piece = self.vocabulary.tokens[token]
        after = self.text + piece
        return bool(piece) and any(text.startswith(after) for text in self.texts)

    def fill(self, mask: Mask, row: int) -> bool:
        bits = np.zeros(self.vocabulary.mask_words * 32, dtype=np.uint8)
        for token in range(len(self.vocabulary.tokens)):
            bits[token] = self.allows(token)
        mask[row] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if not self.allows(token):
                return count
            self.steps.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self.steps[-num_tokens:]

    def forced(self) -> list[int]:
        return []

    def fork(self) -> Matcher:
        copy = type(self)(self.texts, self.vocabulary)
        copy.steps = list(self.steps)
        return copy


class Compiled:
    num_bytes = 100

    def __init__(self, make: Callable[[], Any]) -> None:
        self.matcher = make


class Finite(GrammarBackend):
    """Reads choices, and JSON schemas that list their values."""

    kinds = frozenset({Kind.CHOICE, Kind.JSON})
    matcher: type[Matcher] = Matcher

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def supports(self, spec: GrammarSpec) -> Support:
        if spec.kind is Kind.CHOICE:
            return Support.full()
        try:
            schema = json.loads(spec.source)
        except ValueError:
            return Support.no("not JSON")
        other = set(schema) - {"enum", "const"} if isinstance(schema, dict) else {"?"}
        return Support.no(f"{sorted(other)[0]} is not supported") if other else Support.full()

    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> Any:
        try:
            source = json.loads(spec.source)
        except ValueError as error:
            raise RequestError(f"not JSON: {error}") from None
        if spec.kind is Kind.JSON:
            values = source.get("enum", [source["const"]] if "const" in source else None)
            source = None if values is None else [json.dumps(value) for value in values]
        if not isinstance(source, list):
            raise RequestError("a list is expected")
        texts = [text.encode() for text in source]
        return Compiled(lambda: self.matcher(texts, self.vocabulary))


def broken(**methods: Any) -> type[Finite]:
    """Return a backend whose matcher differs in some methods."""
    return type("Broken", (Finite,), {"matcher": type("BrokenMatcher", (Matcher,), methods), "__module__": __name__})


def shared_fork(self: Matcher) -> Matcher:
    copy = Matcher.fork(self)
    copy.steps = self.steps
    return copy


def endless_fork(self: Matcher) -> Matcher:
    copy = Matcher.fork(self)
    copy.steps = [step for step in self.steps if step not in self.vocabulary.eos_ids]
    return copy


def shifted_fill(self: Matcher, mask: Mask, row: int) -> bool:
    Matcher.fill(self, mask, row)
    bits = np.unpackbits(mask[row].view(np.uint8), bitorder="little")
    mask[row] = np.packbits(np.roll(bits, 1), bitorder="little").view(np.int32)
    return True


def wide_fill(self: Matcher, mask: Mask, row: int) -> bool:
    Matcher.fill(self, mask, row)
    mask[row, 0] |= 1 << 7
    return True


def neighbour_fill(self: Matcher, mask: Mask, row: int) -> bool:
    mask[:] = 0
    return Matcher.fill(self, mask, row)


def eos_fill(self: Matcher, mask: Mask, row: int) -> bool:
    Matcher.fill(self, mask, row)
    for eos in self.vocabulary.eos_ids:
        mask[row].view(np.uint8)[eos // 8] |= 1 << eos % 8
    return True


def greedy_accept(self: Matcher, token_ids: Sequence[int]) -> int:
    taken = Matcher.accept(self, token_ids)
    if taken < len(token_ids) and token_ids[taken] == 0 and not self.terminated:
        return taken + 1  # a NUL byte is taken although the mask bans it
    return taken


def raising_accept(self: Matcher, token_ids: Sequence[int]) -> int:
    for token in token_ids:
        self.vocabulary.tokens[token]
    return Matcher.accept(self, token_ids)


def rollback_to_nothing(self: Matcher, num_tokens: int) -> None:
    if self.terminated:
        return
    Matcher.rollback(self, num_tokens)


class Hangs(Finite):
    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> Any:
        while spec.kind is Kind.JSON:
            pass
        return super().compile(spec, limits)


class Slow(Finite):
    def inline(self, spec: GrammarSpec) -> bool:
        return True

    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> Any:
        while len(spec.source) > 100_000:
            pass
        return super().compile(spec, limits)


class UntypedError(Finite):
    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> Any:
        source = json.loads(spec.source)  # a ValueError escapes
        return super().compile(GrammarSpec(kind=spec.kind, source=json.dumps(source)), limits)


class Dishonest(Finite):
    """Reads `const` of a schema and says nothing of the keywords beside it."""

    def supports(self, spec: GrammarSpec) -> Support:
        return Support.full()

    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> Any:
        if spec.kind is Kind.JSON and spec.source.startswith('{"type"'):
            spec = GrammarSpec(kind=Kind.JSON, source='{"enum": ["a", 8, 6, "b", [2], [1, 1]]}')
        return super().compile(spec, limits)


class Loosens(Finite):
    """Has a schema compiled that allows more than the one it was asked about."""

    def supports(self, spec: GrammarSpec) -> Support:
        found = '{"enum": ["a", 8, 6, "b", [2], [1, 1]]}' if spec.kind is Kind.JSON else None
        return Support(SupportLevel.FULL, source=found)


class Rewrites(Finite):
    """Reads `const` only as it rewrites it."""

    def supports(self, spec: GrammarSpec) -> Support:
        answer = super().supports(spec)
        if spec.kind is not Kind.JSON or answer.level is not SupportLevel.FULL:
            return answer
        schema = json.loads(spec.source)
        return Support(SupportLevel.FULL, source=json.dumps({"enum": schema.get("enum", [schema.get("const")])}))

    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> Any:
        if spec.kind is Kind.JSON and '"const"' in spec.source:
            raise RequestError("const is not read")
        return super().compile(spec, limits)


class UnknownKinds(Finite):
    kinds = frozenset({"json"})  # type: ignore[assignment]


class FillsInOrder(Finite):
    def fill_batch(self, matchers: Any, mask: Mask, rows: Sequence[int]) -> list[bool]:
        return [matcher.fill(mask, row) for row, matcher in enumerate(matchers)]


class KnowsOneMask(Finite):
    def known(self, matcher: Any) -> Any:
        mask = np.zeros((1, matcher.vocabulary.mask_words), dtype=np.int32)
        matcher.fill(mask, 0)
        return "all", mask[0]


class Weightless(Finite):
    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> Any:
        compiled = super().compile(spec, limits)
        compiled.num_bytes = 0
        return compiled


KEPT: list[Matcher] = []


def kept_init(self: Matcher, texts: Sequence[bytes], vocabulary: Vocabulary) -> None:
    Matcher.__init__(self, texts, vocabulary)
    KEPT.append(self)


def any_prefix(self: Matcher) -> bool:
    return any(text.startswith(self.text) for text in self.texts)


LEAK: list[int] = []
FAULTS = {
    "kinds of another type": (UnknownKinds, "test_kinds_are_declared", "it must be a frozenset of Kind"),
    "accepts a beginning": (
        broken(accepting=property(any_prefix)),
        "test_accepts_and_rejects",
        "it accepts '\"a' for json",
    ),
    "forces what cannot follow": (
        broken(forced=lambda self: [0]),
        "test_forced_tokens_are_accepted",
        "forced() returns [0], of which 0 are accepted",
    ),
    "fills rows in its own order": (FillsInOrder, "test_fill_batch_equals_fill", "fill_batch and fill differ in row"),
    "has one key for all masks": (KnowsOneMask, "test_known_masks_are_those_of_fill", "known and fill differ after"),
    "states no size": (Weightless, "test_size_is_stated", "num_bytes is 0"),
    "ignores rollback": (
        broken(rollback=lambda self, num_tokens: None),
        "test_rollback_restores",
        "rollback is ignored: after rollback(1)",
    ),
    "does not roll back the end token": (
        broken(rollback=rollback_to_nothing),
        "test_rollback_restores",
        "rollback over the end token does not restore",
    ),
    "fork shares state": (
        broken(fork=shared_fork),
        "test_fork_is_independent",
        "fork shares state: advancing a fork moves its original",
    ),
    "fork forgets the end token": (
        broken(fork=endless_fork),
        "test_rollback_restores",
        "a fork is not terminated after the end token",
    ),
    "matchers share state": (
        broken(steps=property(lambda self: LEAK, lambda self, steps: None)),
        "test_matchers_of_one_grammar_are_independent",
        "state leaks between matchers of one grammar",
    ),
    "keeps matchers": (
        broken(__init__=kept_init),
        "test_keeps_nothing_of_matchers",
        "bytes more for every matcher of ",
    ),
    "mask off by one": (broken(fill=shifted_fill), "test_mask_equals_brute_force", "the mask is off by one"),
    "mask too wide": (
        broken(fill=wide_fill),
        "test_mask_equals_brute_force",
        "the mask allows token 7 (b'\\x07')",
    ),
    "mask of the neighbour": (
        broken(fill=neighbour_fill),
        "test_mask_equals_brute_force",
        "fill writes to other rows of the mask",
    ),
    "end token always allowed": (broken(fill=eos_fill), "test_mask_equals_brute_force", "(an end token)"),
    "accepts a banned token": (
        broken(accept=greedy_accept),
        "test_accept_takes_what_it_says",
        "accept takes a banned token: 0 (b'\\x00')",
    ),
    "raises in accept": (broken(accept=raising_accept), "test_accept_takes_what_it_says", "matchers never raise"),
    "hangs on compile": (Hangs, "test_compiles_in_a_child_process", "it hangs on compile: json"),
    "ignores the time limit": (Slow, "test_timeout_is_honoured", "the time limit is not honoured: choice"),
    "untyped error": (UntypedError, "test_wrong_source_gives_a_typed_error", "raised JSONDecodeError"),
    "dishonest supports": (Dishonest, "test_supports_is_honest", "supports is not honest: it answers FULL for"),
    "offers to compile more": (Loosens, "test_supports_is_honest", "supports is not honest: it answers FULL for"),
}


@pytest.mark.parametrize("backend", [Finite, Rewrites])
def test_a_right_backend_passes(backend: type[Finite]) -> None:
    """The backend that the faults are made from has none, nor has one that compiles what it offers."""
    report = check_class(conformance_class("grammar_backend", plugin_class=backend))
    assert report.passed, report.text()


@pytest.mark.first(10)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_the_fault(fault: str, caught: Callable[..., None]) -> None:
    """A grammar backend with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    limits = {"compile_timeout_s": 2.0 if plugin in (Hangs, Slow) else 0.0}
    caught("grammar_backend", plugin, test, message, select=f"{test} or test_kinds", **limits)
