"""What every grammar backend must do: its matchers obey the laws, its masks are exact, its limits hold."""

from __future__ import annotations

import inspect
import random
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import (
    CompiledGrammar,
    GrammarBackend,
    GrammarLimits,
    GrammarMatcher,
    GrammarSpec,
    Kind,
    Support,
    SupportLevel,
    Vocabulary,
)
from dovetail_testing.checks import check, fail, no_error, raised, shown
from dovetail_testing.conformance.base import Conformance
from dovetail_testing.conformance.compile_child import compile_times
from dovetail_testing.conformance.grammar_laws import (
    accept,
    allowed,
    brute_force,
    check_ends,
    compare_masks,
    encodings,
    is_forced,
    random_walk,
    rollback,
    state_of,
    text_of,
    token_name,
)
from dovetail_testing.conformance.grammar_samples import HOSTILE, SAMPLES, TRAPS, WRONG, small_vocabulary
from dovetail_testing.conformance.growth import bytes_kept
from dovetail_testing.samples import GrammarSample

LIMIT_S = 0.5
"""The time limit given for hostile grammars."""
PATIENCE_S = 2.5
"""How long they may take all the same, on a busy machine."""


class GrammarBackendConformance(Conformance):
    """What every grammar backend must do.

    Attributes:
        samples: Grammars with texts that they accept and reject, beside those that the kit has for each kind.
        compile_timeout_s: How long the compilation of a sample may take before it counts as hanging; 0: do not try
            it in a child process first.
    """

    kind = "grammar_backend"
    samples: ClassVar[Sequence[GrammarSample]] = ()
    compile_timeout_s: ClassVar[float] = 20.0

    _made: ClassVar[GrammarBackend]
    _hang: ClassVar[str]
    _found: ClassVar[list[dict[str, Any]]]

    @classmethod
    def vocabulary(cls) -> Vocabulary:
        """Return the small vocabulary that everything is tested on."""
        return small_vocabulary()

    def _backend(self) -> GrammarBackend:
        cls = type(self)
        if "_made" not in vars(cls):
            with no_error("making the backend for a vocabulary"):
                cls._made = self.plugin()(self.vocabulary())
        return cls._made

    def _supports(self, spec: GrammarSpec) -> Support:
        try:
            answer = self._backend().supports(spec)
        except Exception as error:  # a stranger's class; the message says what it did
            fail(f"supports raised {raised(error)} for {spec.kind.value} {shown(spec.source)}; it never raises")
        check(isinstance(answer, Support), f"supports returns {shown(answer)}, not a Support")
        return answer

    def _usable(self) -> list[GrammarSample]:
        """The samples of kinds that the backend reads and does not refuse."""
        kinds: frozenset[Kind] = getattr(self._backend(), "kinds", frozenset())
        fitting = [sample for sample in (*self.samples, *SAMPLES) if sample.spec.kind in kinds]
        return [sample for sample in fitting if self._supports(sample.spec).level is not SupportLevel.NONE]

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self._no_hang()
        try:
            compiled = self._backend().compile(self._supports(spec).to_compile(spec), GrammarLimits())
            return self._backend().load(compiled) if isinstance(compiled, bytes) else compiled
        except Exception as error:  # a stranger's class; the message says what it did
            fail(f"compiling {spec.kind.value} {shown(spec.source)} raised {raised(error)}")

    def _no_hang(self) -> None:
        """Fail where a sample's compilation never ends, which a child process has found out once."""
        cls = type(self)
        if not self.compile_timeout_s:
            return
        if "_hang" not in vars(cls):
            specs = [self._supports(sample.spec).to_compile(sample.spec) for sample in self._usable()]
            found = self._times(specs, GrammarLimits().timeout_s, self.compile_timeout_s)
            last = found[-1] if found else {"kind": "none"}
            cls._hang, cls._found = "", found
            if last["kind"] == "hang":
                spec = specs[len(found) - 1]
                cls._hang = f"it hangs on compile: {spec.kind.value} {shown(spec.source)}: {last['message']}"
        check(not cls._hang, cls._hang)

    def _times(self, specs: Sequence[GrammarSpec], timeout_s: float, patience_s: float) -> list[dict[str, Any]]:
        file = inspect.getfile(self.plugin_class) if self.plugin_class is not None else None
        return compile_times(self.planned(), file, specs, timeout_s, patience_s)

    def _states(self) -> list[tuple[GrammarSample, GrammarMatcher, list[int]]]:
        """Matchers at states along random walks, with the tokens that led there."""
        found = []
        for number, sample in enumerate(self._usable()):
            compiled = self._compile(sample.spec)
            for length in (0, 1, 3, 7):
                matcher = compiled.matcher()
                walk = random_walk(matcher, self.vocabulary(), random.Random(31 * number + length), length)
                found.append((sample, matcher, walk.tokens))
        return found

    # The standard tests.

    def test_kinds_are_declared(self) -> None:
        """`kinds` says which languages the backend reads, and at least one sample can be compiled."""
        kinds = getattr(self.plugin(), "kinds", None)
        right = isinstance(kinds, frozenset | set) and all(isinstance(kind, Kind) for kind in kinds) and bool(kinds)
        check(right, f"kinds is {shown(kinds)}; it must be a frozenset of Kind")
        check(bool(self._usable()), "there is no sample that it supports: give samples = [GrammarSample(…)]")

    def test_compiles_in_a_child_process(self) -> None:
        """Every sample compiles, and ends, in a process of its own, where the vocabulary comes without an encoder."""
        if not self.compile_timeout_s:
            pytest.skip("compile_timeout_s is 0")
        self._no_hang()
        for sample, found in zip(self._usable(), self._found, strict=False):
            what = f"{sample.spec.kind.value} {shown(sample.spec.source)}"
            check(found["kind"] != "error", f"in a compile process, {what} raised {found['message']}")

    def test_timeout_is_honoured(self) -> None:
        """A hostile grammar that is compiled inside the engine (`inline`) is refused or done within the time limit."""
        backend = self._backend()
        specs = [
            GrammarSpec(kind=kind, source=text) for kind in sorted(backend.kinds) for text in HOSTILE.get(kind, ())
        ]
        specs = [spec for spec in specs if self._supports(spec).level is not SupportLevel.NONE and backend.inline(spec)]
        if not specs:
            pytest.skip("it compiles every hostile grammar in a process that is killed at the limit")
        self._no_hang()
        while specs:
            found = self._times(specs, LIMIT_S, PATIENCE_S)
            for spec, result in zip(specs, found, strict=False):
                is_late = result["kind"] == "hang" or result["seconds"] > PATIENCE_S
                what = f"the time limit is not honoured: {spec.kind.value} {shown(spec.source, 60)} compiles for more"
                check(not is_late, f"{what} than {PATIENCE_S:g} s under limits.timeout_s = {LIMIT_S:g}")
            specs = specs[max(len(found), 1) :]

    def test_wrong_source_gives_a_typed_error(self) -> None:
        """A source that cannot be read is a RequestError; `supports` answers it without raising."""
        self._no_hang()
        for kind in sorted(self._backend().kinds):
            for source in WRONG.get(kind, ()):
                spec = GrammarSpec(kind=kind, source=source)
                self._supports(spec)
                try:
                    made = self._backend().compile(spec, GrammarLimits())
                    if isinstance(made, bytes):
                        self._backend().load(made)
                except RequestError as error:
                    check(bool(str(error)), f"the RequestError for {kind.value} {source!r} says nothing")
                except Exception as error:  # a stranger's class; the message says what it did
                    fail(f"a wrong source gives an untyped error: {kind.value} {source!r} raised {raised(error)}, not "
                         "a RequestError")  # fmt: skip
                else:
                    fail(f"a wrong source is accepted: {kind.value} {source!r}")

    def test_supports_is_honest(self) -> None:
        """What is not enforced is named: `supports` says FULL only for what the masks enforce."""
        for sample in self.samples:
            if sample.support is not None and sample.spec.kind in self._backend().kinds:
                got = self._supports(sample.spec).level
                what = f"{sample.spec.kind.value} {shown(sample.spec.source)}"
                check(
                    got is sample.support, f"supports answers {got} for {what}, and the sample states {sample.support}"
                )
        if Kind.JSON not in self._backend().kinds:
            return
        for trap in TRAPS:
            spec = GrammarSpec(kind=Kind.JSON, source=trap.schema)
            answer = self._supports(spec)
            self._check_answer(answer, trap.keyword)
            if answer.level is SupportLevel.FULL:
                matcher = self._compile(spec).matcher()
                wrong = _matches(matcher, self.vocabulary(), trap.invalid)
                check(
                    not wrong, f"supports is not honest: it answers FULL for {trap.schema}, and {trap.invalid} passes"
                )

    def _check_answer(self, answer: Support, keyword: str) -> None:
        if answer.level is SupportLevel.APPROXIMATE:
            named = any(keyword in part for part in answer.ignored)
            check(named, f"supports answers APPROXIMATE and does not name {keyword!r} in ignored: {answer.ignored}")
        elif answer.level is SupportLevel.NONE:
            check(bool(answer.reason), f"supports answers NO without a reason (keyword {keyword!r})")

    def test_accepts_and_rejects(self) -> None:
        """Texts that match are accepted as a whole, others are not, however they are tokenized."""
        for sample in self._usable():
            compiled = self._compile(sample.spec)
            for text, want in [(t, True) for t in sample.accepts] + [(t, False) for t in sample.rejects]:
                for tokens in encodings(self.vocabulary(), text):
                    matcher = compiled.matcher()
                    got = accept(matcher, tokens) == len(tokens) and matcher.accepting
                    verb = "refuses" if want else "accepts"
                    check(got is want, f"it {verb} {text!r} for {sample.spec.kind.value} {shown(sample.spec.source)}")

    def test_fork_is_independent(self) -> None:
        """A fork and its original go their own ways."""
        vocabulary = self.vocabulary()
        for sample, matcher, tokens in self._states():
            before = state_of(matcher, vocabulary)
            fork = matcher.fork()
            where = f"after {text_of(vocabulary, tokens)!r} in {shown(sample.spec.source)}"
            check(state_of(fork, vocabulary) == before, f"a fork is in another state than its original {where}")
            walk = random_walk(fork, vocabulary, random.Random(3), 3)
            check(
                state_of(matcher, vocabulary) == before,
                f"fork shares state: advancing a fork moves its original {where}",
            )
            at = state_of(fork, vocabulary)
            random_walk(matcher, vocabulary, random.Random(8), 2)
            check(state_of(fork, vocabulary) == at, f"fork shares state: advancing the original moves a fork {where}")
            rollback(fork, len(walk.tokens))
            check(state_of(fork, vocabulary) == before, f"rollback on a fork does not lead back {where}")

    def test_matchers_of_one_grammar_are_independent(self) -> None:
        """Requests that share a compiled grammar do not touch each other."""
        for sample in self._usable():
            compiled = self._compile(sample.spec)
            one, two = compiled.matcher(), compiled.matcher()
            start = state_of(one, self.vocabulary())
            random_walk(two, self.vocabulary(), random.Random(5), 4)
            same = state_of(one, self.vocabulary()) == start
            check(same, f"state leaks between matchers of one grammar: {shown(sample.spec.source)}")

    def test_keeps_nothing_of_matchers(self) -> None:
        """Requests that are over leave nothing behind in the grammar that they shared, nor in the backend."""
        for sample in self._usable()[:1]:
            compiled = self._compile(sample.spec)

            def serve(compiled: CompiledGrammar = compiled) -> None:
                random_walk(compiled.matcher(), self.vocabulary(), random.Random(7), 3)  # the same: states are known

            kept = bytes_kept(serve, 16)
            check(not kept, f"{kept} bytes more for every matcher of {shown(sample.spec.source)}")

    def test_rollback_restores(self) -> None:
        """Undoing tokens, an end token included, leads to the state before them."""
        vocabulary = self.vocabulary()
        for number, sample in enumerate(self._usable()):
            matcher = self._compile(sample.spec).matcher()
            walk = random_walk(matcher, vocabulary, random.Random(number), 8)
            for back in range(len(walk.tokens) + 1):
                rollback(matcher, back)
                left = len(walk.tokens) - back
                self._check_rolled(matcher, walk.masks, left, back, sample)
                again = accept(matcher, walk.tokens[left:])
                check(
                    again == back, f"after rollback({back}) the same tokens are refused ({shown(sample.spec.source)})"
                )
            self._check_end(matcher, sample)

    def _check_rolled(self, matcher: Any, masks: Any, left: int, back: int, sample: GrammarSample) -> None:
        now = allowed(matcher, self.vocabulary())
        if not bool((now == masks[left]).all()):
            ignored = bool((now == masks[-1]).all())
            what = "rollback is ignored" if ignored else "rollback leads to a wrong state"
            fail(f"{what}: after rollback({back}) the mask is not that of {left} tokens ({shown(sample.spec.source)})")

    def _check_end(self, matcher: Any, sample: GrammarSample) -> None:
        if not sample.accepts:
            return
        vocabulary, where = self.vocabulary(), f"({shown(sample.spec.source)})"
        matcher = self._compile(sample.spec).matcher()
        accept(matcher, encodings(vocabulary, sample.accepts[0])[0])
        before = state_of(matcher, vocabulary)
        for eos in sorted(vocabulary.eos_ids):
            check(accept(matcher, [eos]) == 1, f"the end token {eos} is refused where the text is complete {where}")
            check(matcher.terminated, f"not terminated after the end token {eos} {where}")
            check(matcher.fork().terminated, f"a fork is not terminated after the end token {eos} {where}")
            check(accept(matcher, [ord("a")]) == 0, f"a token is accepted after the end token {where}")
            rollback(matcher, 1)
            check(state_of(matcher, vocabulary) == before, f"rollback over the end token does not restore {where}")

    def test_mask_equals_brute_force(self) -> None:
        """The mask allows exactly what `accept` takes (or the forced token alone), and ends where text is complete."""
        vocabulary = self.vocabulary()
        for sample, matcher, tokens in self._states():
            where = f"after {text_of(vocabulary, tokens)!r} in {sample.spec.kind.value} {shown(sample.spec.source)}"
            mask = allowed(matcher, vocabulary)
            if not is_forced(mask, matcher):
                compare_masks(mask, brute_force(matcher, vocabulary), vocabulary, where)
            check_ends(mask, matcher, vocabulary, where)

    def test_accept_takes_what_it_says(self) -> None:
        """`accept` counts the tokens taken, stops at the first that is refused, and never raises."""
        vocabulary = self.vocabulary()
        for sample, matcher, tokens in self._states():
            where = f"after {text_of(vocabulary, tokens)!r} in {shown(sample.spec.source)}"
            before = state_of(matcher, vocabulary)
            mask = allowed(matcher, vocabulary)
            banned = [] if is_forced(mask, matcher) else [int(i) for i in np.flatnonzero(~mask)]
            for token in [*banned[:3], *banned[-2:]]:
                taken = accept(matcher, [token])
                name = token_name(vocabulary, token)
                check(taken == 0, f"accept takes a banned token: {name} {where}")
                check(state_of(matcher, vocabulary) == before, f"a refused token ({name}) changes the state {where}")
            check(accept(matcher, []) == 0, f"accept([]) does not return 0 {where}")
            walk = random_walk(matcher.fork(), vocabulary, random.Random(2), 4)
            got = accept(matcher, [*walk.tokens, vocabulary.size - 1])
            check(got == len(walk.tokens), f"accept counts {got} of {len(walk.tokens)} tokens given at once {where}")
            now = allowed(matcher, vocabulary)
            check(bool((now == walk.masks[-1]).all()), f"tokens given at once lead elsewhere than one by one {where}")

    def test_forced_tokens_are_accepted(self) -> None:
        """What `forced` returns can follow."""
        for sample, matcher, tokens in self._states():
            forced = list(matcher.forced())
            taken = accept(matcher.fork(), forced)
            where = f"after {text_of(self.vocabulary(), tokens)!r} in {shown(sample.spec.source)}"
            check(taken == len(forced), f"forced() returns {forced}, of which {taken} are accepted {where}")

    def test_fill_batch_equals_fill(self) -> None:
        """Filling rows in one call gives what filling them one by one gives."""
        vocabulary = self.vocabulary()
        matchers = [matcher for _, matcher, _ in self._states()]
        rows = list(range(len(matchers)))
        random.Random(1).shuffle(rows)
        mask = np.zeros((len(matchers), vocabulary.mask_words), dtype=np.int32)
        written = self._backend().fill_batch(matchers, mask, rows)
        for matcher, row, was_written in zip(matchers, rows, written, strict=True):
            bits = np.unpackbits(mask[row].view(np.uint8), bitorder="little")[: vocabulary.size].astype(np.bool_)
            got = bits if was_written else np.ones(vocabulary.size, dtype=np.bool_)
            check(bool((got == allowed(matcher, vocabulary)).all()), f"fill_batch and fill differ in row {row}")

    def test_known_masks_are_those_of_fill(self) -> None:
        """A mask that is at hand, for a device to keep, is what `fill` computes, whoever else has its key."""
        vocabulary, backend = self.vocabulary(), self._backend()
        states = self._states()
        mask = np.zeros((len(states), vocabulary.mask_words), dtype=np.int32)
        backend.fill_batch([matcher for _, matcher, _ in states], mask, range(len(states)))
        kept: dict[Hashable, np.ndarray[Any, Any]] = {}
        for sample, matcher, tokens in states:
            known = backend.known(matcher)
            if known is None:
                continue
            line = kept.setdefault(known[0], known[1].copy())
            bits = np.unpackbits(line.view(np.uint8), bitorder="little")[: vocabulary.size].astype(np.bool_)
            where = f"after {text_of(vocabulary, tokens)!r} in {shown(sample.spec.source)}"
            check(bool((bits == allowed(matcher, vocabulary)).all()), f"known and fill differ {where}")

    def test_size_is_stated(self) -> None:
        """A compiled grammar says how much memory it holds."""
        for sample in self._usable():
            size = self._compile(sample.spec).num_bytes
            check(isinstance(size, int) and size > 0, f"num_bytes is {size!r} for {shown(sample.spec.source)}")


def _matches(matcher: GrammarMatcher, vocabulary: Vocabulary, text: str) -> bool:
    tokens = encodings(vocabulary, text)[0]
    return accept(matcher, tokens) == len(tokens) and matcher.accepting
