"""What grammars cost where no model is needed: compiling schemas, and the masks of their tokens."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import torch

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.compile.cache import Enforced, RejectedGrammar
from dovetail.grammar.compile.jobs import CompileFuture
from dovetail.grammar.compile.service import GrammarService
from dovetail.grammar.matching.bitmask import fill_masks
from dovetail.grammar.matching.constraint import Constraint, TokenSets
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime.sampling.masks import MaskBuffer
from dovetail.sdk.masks import ids_of
from dovetail_server.bench.grammar_schemas import schemas

# The llguidance library alone, as its own users call it: what the time to a first mask is compared with.


class _Tokens:
    """A vocabulary as the library asks for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens) + [b""] * (vocabulary.size - len(vocabulary.tokens))
        for token_id in vocabulary.special_ids:
            self.tokens[token_id] = b"<|special_%d|>" % token_id
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._ids = {token: token_id for token_id, token in enumerate(self.tokens)}

    def __call__(self, text: str) -> list[int]:
        """Encode byte by byte: the library asks how its tokens are cut, which does not matter to a first mask."""
        return [self._ids[bytes([byte])] for byte in text.encode()]


class RawLibrary:
    """Its tokenizer with the library's own settings; no checks, no routing, no other process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Make the tokenizer, and use it once."""
        wrapped = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=vocabulary.size, eos_token=sorted(vocabulary.eos_ids))
        self._row = np.zeros((1, vocabulary.mask_words), dtype=np.int32)
        self.time(GrammarSpec(kind=Kind.JSON, source='{"type": "null"}'))

    def time(self, spec: GrammarSpec) -> tuple[float, float] | None:
        """Return seconds and processor seconds from a schema to its first mask; None where it is refused."""
        given = json.loads(spec.source)
        started, worked = time.perf_counter(), time.process_time()
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(given))
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            return None
        matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        return time.perf_counter() - started, time.process_time() - worked


Points = dict[str, float]
WALK_LEN = 60
SETTLE_S = 0.1
"""After compiling: a backend may prepare a grammar while its first request prefills."""


def points(values: Sequence[float], scale: float) -> Points:
    """Return percentiles and the mean, in units of 1 / `scale` seconds."""
    ordered = sorted(values)
    found = {f"p{p}": ordered[min(len(ordered) - 1, p * len(ordered) // 100)] * scale for p in (50, 95, 99)}
    return found | {"mean": statistics.fmean(values) * scale, "max": ordered[-1] * scale}


def specs_of(num: int, seed: int) -> list[GrammarSpec]:
    """Return `num` schemas as specs."""
    return [GrammarSpec(kind=Kind.JSON, source=json.dumps(s)) for s in schemas(num, seed)]


def _compared(pairs: Sequence[tuple[float, float, float, float]]) -> dict[str, Any]:
    """Return what the library alone takes for the schemas that it enforces, and the ratio of each schema."""
    if not pairs:
        return {}
    return {
        "the library alone, ms to the first mask": points([there for _, there, _, _ in pairs], 1e3),
        "as a multiple of it, schema by schema": points([here / there for here, there, _, _ in pairs], 1),
        "CPU time as a multiple of it": points([here / there for _, _, here, there in pairs], 1),
    }


class MaskBench:
    """Schemas compiled as the engine does it, and walks through them."""

    def __init__(self, vocabulary: Vocabulary, num_schemas: int, seed: int) -> None:
        """Load the backends and wait until they are warm."""
        self.vocabulary = vocabulary
        self._specs = specs_of(num_schemas, seed)
        plugins = load(make_plan(Registry.scan(), grammar_backend="auto"), "engine")
        self.service = GrammarService(plugins, lambda: vocabulary, timeout_s=5, cache_bytes=1 << 30)
        self._router = GrammarRouter(
            {p.name: backend(vocabulary) for p, backend in plugins.candidates("grammar_backend")}
        )
        self.service.warm_up()
        warm = GrammarSpec(kind=Kind.JSON, source='{"type": "null"}')
        self._outcome(self.service.request(self._router.route(warm, "json_schema").engine_options))
        self._raw = RawLibrary(vocabulary)

    def compile(self) -> tuple[dict[str, Any], list[Enforced]]:
        """Time new schemas and known ones, from the spec to a matcher in hand, with the first mask filled.

        The library alone goes first and second in turns, as what comes second finds warm caches.
        """
        new, busy, known, made, refused, full = [], [], [], [], 0, 0
        pairs: list[tuple[float, float, float, float]] = []  # seconds, then CPU seconds: here, and the library alone
        row = np.zeros((1, self.vocabulary.mask_words), dtype=np.int32)
        for number, spec in enumerate(self._specs):
            alone = self._raw.time(spec) if number % 2 else None
            started, worked = time.perf_counter(), time.process_time()
            try:
                route = self._router.route(spec, "json_schema")
            except RequestError:
                refused += 1
                continue
            outcome = self._outcome(self.service.request(route.engine_options))
            if not isinstance(outcome, Enforced):
                refused += 1
                continue
            outcome.compiled.matcher().fill(row, 0)
            new.append(time.perf_counter() - started)
            busy.append(time.process_time() - worked)
            time.sleep(SETTLE_S)
            alone = alone if number % 2 else self._raw.time(spec)
            if alone is not None:
                pairs.append((new[-1], alone[0], busy[-1], alone[1]))
            known.append(statistics.median(self._time_known(route.engine_options) for _ in range(3)))
            made.append(outcome)
            full += route.options[outcome.option].enforcement == "full"
        results: dict[str, Any] = {
            "new schema, ms to the first mask": points(new, 1e3),
            "of it CPU time here, ms": points(busy, 1e3),
            "known schema, CPU µs": points(known, 1e6),
            **_compared(pairs),
        }
        return results | {"accepted": len(made), "exact": full, "refused": refused}, made

    def walks(self, made: Sequence[Enforced], seed: int) -> dict[str, Any]:
        """Time the masks along random texts of each grammar: its first walk, then the same walk again."""
        first: list[float] = []
        again: list[float] = []
        for place, outcome in enumerate(made):
            taken = self._walk(outcome.compiled, random.Random(seed + place), first)
            self._follow(outcome.compiled, taken, again)
        return {
            "first visits, µs": points(first, 1e6),
            "later visits, µs": points(again, 1e6),
            "masks": len(first) + len(again),
        }

    def batch(self, made: Sequence[Enforced], num_rows: int) -> dict[str, Any]:
        """Time the masks of a step of constrained rows on the host: filled in one call, applied to logits."""
        sets = TokenSets(self.vocabulary)
        constraints = [
            Constraint(sets, None, made[i % len(made)].compiled.matcher(), made[i % len(made)].backend)
            for i in range(num_rows)
        ]
        buffer = MaskBuffer(self.vocabulary.mask_words, torch.device("cpu"))
        logits = torch.randn(num_rows, self.vocabulary.size)
        fills, applies = [], []
        # On one core no threads help, and CPU time is what a quiet machine would take.
        clock = time.thread_time if len(os.sched_getaffinity(0)) == 1 else time.perf_counter
        rng = random.Random(0)
        for _ in range(30):
            started = clock()
            mask_of, _ = fill_masks(constraints, [False] * num_rows, buffer.lend)
            fills.append(clock() - started)
            mask = buffer.mask_of(mask_of)
            if mask is None:
                break
            mask.apply(logits)
            applies.append(clock() - started - fills[-1])
            for row, constraint in enumerate(constraints):
                allowed = [t for t in ids_of(mask.words[row].numpy()) if t not in self.vocabulary.eos_ids]
                if allowed:
                    constraint.accept(rng.choice(allowed))
        fills, applies = fills[1:], applies[1:]  # the first step allocates
        return {
            f"fill, {num_rows} rows, µs per row": points(fills, 1e6 / num_rows),
            f"apply on CPU, {num_rows} rows, µs per row": points(applies, 1e6 / num_rows),
        }

    def close(self) -> None:
        """End threads and processes."""
        self.service.close()

    def _outcome(self, future: CompileFuture) -> Enforced | RejectedGrammar | None:
        """Wait for a future as the engine does, without its other work."""
        while not future.is_ready:
            self.service.wait(0.002)
        return future.outcome

    def _time_known(self, options: Any) -> float:
        started = time.thread_time()
        outcome = self.service.request(options).outcome
        if isinstance(outcome, Enforced):
            outcome.compiled.matcher()
        return time.thread_time() - started

    def _walk(self, grammar: CompiledGrammar, rng: random.Random, took: list[float]) -> list[int]:
        """Go on with tokens drawn from the masks; CPU time, as others share the machine."""
        row = np.zeros((1, self.vocabulary.mask_words), dtype=np.int32)
        matcher, taken = grammar.matcher(), []
        for _ in range(WALK_LEN):
            started = time.thread_time()
            matcher.fill(row, 0)
            took.append(time.thread_time() - started)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8)[0], bitorder="little"))
            token = int(allowed[rng.randrange(len(allowed))]) if len(allowed) else -1
            if token < 0 or token in self.vocabulary.eos_ids or matcher.accept([token]) != 1:
                break
            taken.append(token)
        return taken

    def _follow(self, grammar: CompiledGrammar, taken: Sequence[int], took: list[float]) -> None:
        row = np.zeros((1, self.vocabulary.mask_words), dtype=np.int32)
        matcher = grammar.matcher()
        for token in taken:
            started = time.thread_time()
            matcher.fill(row, 0)
            took.append(time.thread_time() - started)
            matcher.accept([token])
