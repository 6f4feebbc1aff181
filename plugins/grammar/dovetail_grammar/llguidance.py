r"""`llguidance`: grammars by the llguidance library (an Earley parser over a lazy lexer).

It reads all kinds. JSON Schema is enforced exactly or refused: what it does not implement is an error, never ignored,
unless the spec relaxes it. Formats it does not know are annotations, as JSON Schema says they are by default.

Defined by llguidance's docs/json_schema.md and docs/syntax.md (1.9).
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import (
    CompiledGrammar,
    GrammarLimits,
    GrammarMatcher,
    GrammarSpec,
    Kind,
    Support,
    SupportLevel,
    Vocabulary,
)
from dovetail.sdk.masks import Words, draw_ids
from dovetail.sdk.schemas.structural import schemas_with_places
from dovetail_grammar.call_states import CallTexts, followed, states_of
from dovetail_grammar.gbnf import GbnfError
from dovetail_grammar.json_reader import Counts
from dovetail_grammar.json_states import SharedMask, States, TextState
from dovetail_grammar.kept_masks import KeptMasks
from dovetail_grammar.llguidance_cost import is_cheap
from dovetail_grammar.llguidance_errors import first_line, worded
from dovetail_grammar.llguidance_schema import SchemaWalk, prepare_schema, spacing
from dovetail_grammar.llguidance_source import to_llguidance
from dovetail_grammar.llguidance_tokenizer import make_tokenizer
from dovetail_grammar.matching import EndingMatcher, Ends
from dovetail_grammar.schema_backend import (
    LibrarySupport,
    SchemaBackend,
    import_library,
    inner_matchers,
    narrow,
)
from dovetail_grammar.structural_lost import lost_in

if TYPE_CHECKING:
    from dovetail.contracts.grammar import Mask

MAX_THREADS = 8
MIN_PARALLEL = 8
"""Rows from which on threads fill masks."""
PER_BASE, MAX_BASES, MAX_BUILD_S = 8, 8, 0.003
"""Requests that share a matcher's derivations, such matchers of a grammar, and what building one may take of a core."""
MAX_UNTOLD = 32
"""Tokens that a matcher takes by the masks of its states before the library hears of them: 1 to 2 µs each, then. Half
as many at least, and each time another number: rows that go along together would all be told of them in one step."""
MATCHER_BYTES, SOURCE_BYTES = 160 << 10, 160
"""What a matcher takes, and more for each character of its grammar: measured over six kinds of schemas."""
NUM_WALKS, WALK_CHOICES, WALK_PAUSE_S = 3, 6, 0.0002
_INVALID = re.compile(
    r"Unsatisfiable|does not exist|Invalid type|unknown name|not found|Expected|[Pp]arse|token|NoExtensionBias"
    r"|lexer error|no start"
)
"""Errors that no other backend would see differently."""
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 30_000,
    "max_items_in_row": 5_000,
    "verbose_errors": False,
}


class LlguidanceBackend(SchemaBackend):
    """See the module."""

    kinds = frozenset(Kind)
    preference = dict.fromkeys(Kind, 100)

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Keep the vocabulary; the library's own tokenizer is made at first use."""
        super().__init__(vocabulary)
        self._num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)) - 1)
        self._executor: Any = None
        self._kept: KeptMasks | None = None
        self._texts: CallTexts | None = None
        self._library = import_library("llguidance", "llguidance")

    def library_supports(self, spec: GrammarSpec) -> Support:
        """Walk JSON Schemas for what the library does not implement; other kinds it reads in full."""
        if spec.kind is Kind.JSON:
            return SchemaWalk(spec.source).support()
        if spec.kind is Kind.STRUCTURAL:
            return _structural_support(spec, self._vocabulary.added)
        return Support.full()

    def library_inline(self, spec: GrammarSpec) -> bool:
        """The library releases the GIL, and the cost of a cheap grammar is known in advance."""
        return is_cheap(spec)

    def library_compile(self, spec: GrammarSpec, limits: GrammarLimits) -> CompiledGrammar | bytes:
        """Compile. A source that may be costly returns as the library's form of it, which `library_load` builds."""
        try:
            source = to_llguidance(self._library, self._prepared(spec), self._vocabulary)
        except ValueError as error:
            code = "unsupported_grammar" if isinstance(error, GbnfError) else "invalid_grammar"
            raise RequestError(f"the grammar cannot be read: {error}", code=code) from None
        if not self.library_inline(spec):
            return json.dumps([spec.kind, source, followed(spec)]).encode()
        return self._build(source, spec.kind, followed(spec))

    def library_load(self, blob: bytes) -> CompiledGrammar:
        """Build from the library's form, with which its kind stands, and what tells its states."""
        kind, source, vocabulary_digest = json.loads(blob)
        return self._build(source, Kind(kind), vocabulary_digest)

    def _build(self, source: str, kind: Kind, vocabulary_digest: str) -> LlguidanceGrammar:
        """Build, and compute the first mask, so that the lexer's first states are made outside the engine's loop."""
        self._shared()  # made once, and not part of what follows
        began = time.thread_time()
        matcher = self._matcher(source)
        took_s = time.thread_time() - began
        if error := matcher.get_error():
            code = "invalid_grammar" if _INVALID.search(error) else "unsupported_grammar"
            raise RequestError(f"the grammar cannot be enforced: {worded(error, kind)}", code=code)
        row = np.zeros((1, self._vocabulary.mask_words), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            text = f"the grammar cannot be enforced: {worded(matcher.get_error(), kind)}"
            raise RequestError(text, code="unsupported_grammar")
        build = None if took_s > MAX_BUILD_S else lambda: self._matcher(source)
        make_states = (lambda: states_of(kind, vocabulary_digest, self._made_texts())) if vocabulary_digest else None
        return LlguidanceGrammar(matcher, row[0], len(source), self._ends, build, make_states)

    def _matcher(self, source: str) -> Any:
        library = self._library
        return library.LLMatcher(self._shared(), source, log_level=0, limits=library.LLParserLimits(**LIMITS))

    def library_warm_up(self, grammar: CompiledGrammar, timeout_s: float) -> None:
        """Walk over plausible texts: what the lexer meets for the first time costs many times what it costs later."""
        if isinstance(grammar, LlguidanceGrammar):
            grammar.follow()
        for seed in range(NUM_WALKS):
            self._walk(grammar.matcher(), random.Random(seed), time.perf_counter() + timeout_s / NUM_WALKS)

    def known(self, matcher: GrammarMatcher) -> tuple[Hashable, Words] | None:
        """Return the mask that is kept for the matcher's state, which stands for it."""
        shared = matcher.known() if isinstance(matcher, LlguidanceMatcher) else None
        if shared is None or shared.line is None:
            return None
        shared.is_used = True
        return shared, shared.line

    def fill_batch(self, matchers: Sequence[GrammarMatcher], mask: Mask, rows: Sequence[int]) -> list[bool]:
        """Copy the masks of states that are known, and compute each other state's once; called by one thread only."""
        kept = self._kept
        if kept is None:
            kept = self._kept = KeptMasks(self._vocabulary.mask_words)
        going: list[tuple[LlguidanceMatcher, int]] = []
        first: dict[SharedMask, int] = {}
        equal: list[tuple[LlguidanceMatcher, int, int]] = []
        for matcher, row in zip(inner_matchers(matchers), rows, strict=True):
            if not isinstance(matcher, LlguidanceMatcher) or matcher.terminated:
                matcher.fill(mask, row)
                continue
            shared = matcher.shared
            if shared is not None and shared.line is not None:
                mask[row] = shared.line
                shared.is_used = True
            elif shared is not None and shared in first:
                equal.append((matcher, row, first[shared]))
            elif matcher.is_over:
                matcher.fill(mask, row)
            else:
                going.append((matcher, row))
                if shared is not None:
                    first[shared] = row
        failed = self._compute(going, mask)
        for shared, row in first.items():
            if row not in failed:
                kept.keep(shared, mask[row])
        for matcher, row, at in equal:
            if at in failed:
                matcher.fill(mask, row)
            else:
                mask[row] = mask[at]
        narrow(matchers, mask, rows)
        return [True] * len(matchers)

    def _compute(self, going: Sequence[tuple[LlguidanceMatcher, int]], mask: Mask) -> set[int]:
        """Fill many rows in the library's threads, without the GIL; few one by one, as threads take time to wake.

        Returns:
            The rows of matchers that have failed; they allow nothing.
        """
        if len(going) < MIN_PARALLEL or self._num_threads < 2:
            for matcher, row in going:
                matcher.fill(mask, row)
        else:
            with self._lock:
                if self._executor is None:
                    self._executor = self._library.LLExecutor(self._num_threads)
            work = [(matcher.inner, row) for matcher, row in going]
            self._executor.unsafe_compute_mask_ptr(work, mask.ctypes.data, mask.strides[0], mask.shape[0])
        failed = {row for matcher, row in going if matcher.error is not None}
        for row in failed:
            mask[row] = 0
        return failed

    def _walk(self, matcher: GrammarMatcher, rng: random.Random, deadline: float) -> None:
        """Follow the masks, closing strings soon, and leaving out mere whitespace where something else may come.

        The engine computes meanwhile and wants the GIL: it is held for moments only.
        """
        mask = np.zeros((1, self._vocabulary.mask_words), dtype=np.int32)
        tokens = self._vocabulary.tokens
        while time.perf_counter() < deadline:
            matcher.fill(mask, 0)
            drawn = draw_ids(mask[0], WALK_CHOICES, rng)
            preferred_token = min(
                (t for t in drawn if t < len(tokens)),
                key=lambda t: (tokens[t].isspace(), b'"' not in tokens[t]),
                default=None,
            )
            if preferred_token is None or matcher.accept([preferred_token]) != 1 or matcher.terminated:
                return
            time.sleep(WALK_PAUSE_S)

    def _prepared(self, spec: GrammarSpec) -> GrammarSpec:
        if spec.kind is not Kind.JSON and spec.kind is not Kind.JSON_OBJECT:
            return spec
        return replace(spec, kind=Kind.JSON, source=prepare_schema(spec, spacing(spec)))

    def _made_texts(self) -> CallTexts:
        if self._texts is None:
            self._texts = CallTexts(self._vocabulary)
        return self._texts

    def library_shared(self) -> Any:
        """Make the library's tokenizer."""
        return make_tokenizer(self._library, self._vocabulary)


class LlguidanceGrammar:
    """A compiled grammar: matchers at its start, of which each request gets a copy.

    Copies of one matcher share what the library derives while they compute masks, behind a lock: threads that fill the
    masks of many requests take turns at it. So every `PER_BASE` requests at a time have a matcher of their own to copy.
    """

    def __init__(
        self,
        base: Any,
        first: Words,
        num_source: int,
        ends: Ends,
        build: Callable[[], Any] | None,
        make_states: Callable[[], States | None] | None,
    ) -> None:
        """Keep what matchers are made of.

        Args:
            base: A matcher at the start.
            first: Its mask `[W]`, which no request computes again.
            num_source: Characters of the grammar.
            ends: The tokens that end a reply.
            build: Makes another matcher like `base`, where that is known to be cheap.
            make_states: Makes the states of the grammar's texts, where they may be told.
        """
        self.states: States | None = None
        self._lanes: list[tuple[Any, WeakSet[LlguidanceMatcher]]] = [(base, WeakSet())]
        self._ends, self._build = ends, build
        self.first, self._num_source = first, num_source
        self._make_states = make_states
        self._num_turns = 0

    def __del__(self) -> None:
        """Release its states; no matcher is left, because each holds this object."""
        if self.states is not None:
            self.states.end()

    def next_turn(self) -> int:
        """Return after how many tokens the library hears of them next time: all numbers from the half on, in turn."""
        self._num_turns += 1
        return MAX_UNTOLD - self._num_turns % (MAX_UNTOLD // 2)

    def follow(self) -> None:
        """Have the matchers know their states from now on, where the grammar tells them; those in use, too."""
        make_states, self._make_states = self._make_states, None
        if make_states is not None:
            self.states = make_states()

    @property
    def num_bytes(self) -> int:
        """An estimate, as the library does not say: matchers that texts have followed, and the states so far."""
        each = MATCHER_BYTES + SOURCE_BYTES * self._num_source
        states = 0 if self.states is None else self.states.num_bytes
        return len(self._lanes) * each + self.first.nbytes + states

    def matcher(self) -> LlguidanceMatcher:
        """Return a matcher at the start."""
        base, taken = min(self._lanes, key=lambda lane: len(lane[1]))
        if len(taken) >= PER_BASE and len(self._lanes) < MAX_BASES and self._build is not None:
            base, taken = self._build(), WeakSet()
            self._lanes.append((base, taken))
        if len(self._lanes) > 1:
            self.follow()  # several at once are worth it, though the grammar was not prepared
        made = LlguidanceMatcher(base.deep_copy(), self._ends, self)
        taken.add(made)
        return made


class LlguidanceMatcher(EndingMatcher):
    """One request's state."""

    def __init__(self, inner: Any, ends: Ends, grammar: LlguidanceGrammar, *, terminated: bool = False) -> None:
        super().__init__(ends, terminated=terminated)
        self._inner = inner
        self._grammar = grammar
        self._taken: list[int] = []
        self._num_consumed = 0
        self._refused = ""
        self._places: list[tuple[TextState | None, Counts]] = []
        self._now: SharedMask | None = None
        self._max_untold = grammar.next_turn()
        self._failure: str | None = None
        self._was_asked = True

    @property
    def inner(self) -> Any:
        """The library's matcher, which has been told of all tokens; it may fail at whatever it is asked."""
        self._was_asked = True
        if self._num_consumed < len(self._taken):
            self._consume()
        return self._inner

    @property
    def shared(self) -> SharedMask | None:
        """What this state has in common with others that are followed by the same texts, where that is known."""
        places, taken = self._places, self._taken
        if len(places) > len(taken):
            return self._now
        known = self._grammar.states
        if known is None:
            return None
        if not places:
            places.append((known.start, ()))
        state, counts = places[-1]
        for token_id in taken[-1:] if len(places) == len(taken) else taken[len(places) - 1 :]:
            if state is not None:
                state, change = state.following.get(token_id) or known.after(state, token_id)
                if change is not None:
                    counts = change.of(counts)
            places.append((state, counts))
        self._now = None if state is None else state.shared or state.counted.get(counts) or known.shared(state, counts)
        return self._now

    @property
    def error(self) -> str | None:
        """The library's error, as far as it has been told of the text; looked for again once it was asked something."""
        if self._was_asked:
            inner, self._was_asked = self._inner, False
            self._failure = first_line(inner.get_error()) if inner.is_error() else None
        return self._failure or self._refused or None

    def known(self) -> SharedMask | None:
        """Return `shared`, where a mask kept for it holds: no end was accepted, and nothing has failed."""
        if self._terminated or self._failure or self._refused or (self._was_asked and self.error is not None):
            return None
        return self.shared

    @property
    def is_over(self) -> bool:
        """Whether an end has been accepted, or the library has stopped by itself as nothing may follow."""
        return self._terminated or bool(self.inner.is_stopped())

    def forced(self) -> list[int]:
        """Ask the library, which knows how the tokenizer cuts text; once for a state that is known."""
        if self._terminated:
            return []
        shared = self.shared
        if shared is not None and shared.forced is not None:
            return shared.forced.copy()
        tokens: list[int] = [] if self.is_over else self.inner.compute_ff_tokens()
        if shared is not None:
            shared.forced = tokens.copy()
        return tokens

    def _consume(self) -> None:
        """Tell the library of the tokens that masks have allowed since it was last asked something."""
        tokens = self._taken[self._num_consumed :]
        if not self._refused and self._inner.try_consume_tokens(tokens) != len(tokens):
            self._refused = "the grammar refuses a text that its masks had allowed"
        self._num_consumed = len(self._taken)
        self._max_untold = self._grammar.next_turn()

    def fork(self) -> LlguidanceMatcher:
        """Copy."""
        made = LlguidanceMatcher(self.inner.deep_copy(), self._ends, self._grammar, terminated=self._terminated)
        made._taken, made._num_consumed = self._taken.copy(), len(self._taken)
        made._places, made._now, made._refused = self._places.copy(), self._now, self._refused
        return made

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance; without a call of the library over what the masks allow that are kept for its states."""
        for count, token_id in enumerate(token_ids):
            if not self._is_allowed(token_id):
                if not super().accept((token_id,)):
                    return count
            else:
                self._taken.append(token_id)
        return len(token_ids)

    def _is_allowed(self, token_id: int) -> bool:
        """Whether the mask that is kept for this state allows a token that is no end."""
        now, num = self._now, len(self._taken)
        # States are found by `known` or `fill_batch`, in the engine's thread: masks filled one by one have none.
        if now is None or len(self._places) <= num or num - self._num_consumed >= self._max_untold or self._terminated:
            return False
        bits = now.bits
        return bits is not None and bits[token_id >> 3] >> (token_id & 7) & 1 == 1 and token_id not in self._ends.ids

    def _complete(self) -> bool:
        return bool(self.inner.is_accepting())

    def _fill(self, line: Words) -> None:
        if not self._taken:
            line[:] = self._grammar.first
            return
        self.inner.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        if self.error is not None:
            line[:] = 0

    def _advance(self, token_id: int) -> bool:
        """Ask the library."""
        inner = self.inner
        if self._refused or inner.is_stopped() or not inner.try_consume_tokens([token_id]):
            return False
        self._num_consumed += 1
        self._taken.append(token_id)
        return True

    def _retreat(self, num_tokens: int) -> None:
        del self._taken[-num_tokens:]
        del self._places[len(self._taken) :]  # the last one is found again, and what it shares
        if self._num_consumed > len(self._taken):
            self._was_asked = True
            self._inner.rollback(self._num_consumed - len(self._taken))
            self._num_consumed = len(self._taken)


def _structural_support(spec: GrammarSpec, added: Container[str]) -> Support:
    """Join the answers for all schemas in a structural grammar."""
    root = json.loads(spec.source)
    ignored: list[str] = []
    refused: list[str] = []
    for start, schema in schemas_with_places(root, but="text"):
        support = SchemaWalk(json.dumps(schema)).support()
        if support.level is SupportLevel.APPROXIMATE:
            ignored += [start + place for place in support.ignored]
            refused += [start + place for place in support.refused] if isinstance(support, LibrarySupport) else ()
    try:
        ignored += lost_in(root, added)
    except ValueError as error:
        return Support.no(str(error))
    if not ignored:
        return Support.full()
    return LibrarySupport(SupportLevel.APPROXIMATE, tuple(dict.fromkeys(ignored)), refused=tuple(refused))
