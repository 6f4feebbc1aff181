"""Structured outputs in figures: `python tests/bench/grammar.py [--tokenizer FOLDER] [--schemas 300] [--json FILE]`.

Over a vocabulary of 131,072 tokens or a tokenizer's: what a new and a known JSON schema add before the first token, how
long a mask takes, what masks cost a step of 64 rows, and, with `--hostile`, how much hostile grammars delay a steady
load of other requests. With `--end-to-end N`, N random schemas through the demo model, streaming and thinking mixed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from grammar_schemas import schemas

from dovetail import LLM, SamplingParams
from dovetail.contracts.grammar import GrammarSpec, Kind, Vocabulary
from dovetail.demo import MODEL_DIR
from dovetail.engine.inprocess import InProcessClient
from dovetail.engine.messages import GrammarStep, Submit
from dovetail.engine.messages import SamplingParams as EngineParams
from dovetail.errors import RequestError
from dovetail.grammar.bits import ids_of
from dovetail.grammar.cache import Enforced
from dovetail.grammar.constraint import Constraint, TokenSets
from dovetail.grammar.masks import MaskBuffer
from dovetail.grammar.route import Router
from dovetail.grammar.service import GrammarService
from dovetail.grammar.vocabulary import make_vocabulary
from dovetail.plugins import Registry, load, make_plan
from dovetail.settings import EngineSettings
from dovetail.text.tokenizer import Tokenizer

HOSTILE = [
    GrammarStep(backend="llguidance", kind="regex", source="[ab]*a[ab]{20}"),
    GrammarStep(backend="outlines", kind="regex", source="[ab]*a[ab]{20}"),
    GrammarStep(backend="llguidance", kind="regex", source="(x+x+)+y"),
    GrammarStep(backend="llguidance", kind="regex", source="a{100000}"),
    GrammarStep(backend="llguidance", kind="json", source=json.dumps({"enum": [f"v{i}" for i in range(100_000)]})),
    GrammarStep(backend="llguidance", kind="json", source='{"items":' * 10_000 + "{}" + "}" * 10_000),
    GrammarStep(backend="llguidance", kind="json", source='{"anyOf":[{"$ref":"#"},{"$ref":"#"}]}'),
    GrammarStep(backend="llguidance", kind="lark", source='start: (("a"~0..100)~0..100)~0..100'),
    GrammarStep(backend="outlines", kind="regex", source="(((a{0,60}b){0,60}c){0,60}d){0,60}"),
]


def synthetic(size: int = 131_072) -> Vocabulary:
    """A vocabulary of bytes, words and pieces of words, as a byte-level tokenizer has."""
    rng = random.Random(0)
    seen = {bytes([i]): None for i in range(256)}
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    while len(seen) < size - 2:
        word = "".join(rng.choices(letters, weights=range(26, 0, -1), k=rng.randint(1, 9)))
        # About one token in thirty of real vocabularies holds a quote or a newline.
        lead = rng.choice(("", " ", " ", "_", ".")) if rng.random() < 0.97 else rng.choice(("\n", '"', "  "))
        tail = rng.choice(("", "", "", "é", "1")) if rng.random() < 0.98 else rng.choice(('"', '":', '",', "\n"))
        seen[(lead + rng.choice((word, word.title())) + tail).encode()] = None
    tokens = [*seen, b"", b""]
    ends = frozenset((size - 2, size - 1))
    return Vocabulary(tokens=tokens, size=size, eos_ids=ends, special_ids=ends, fingerprint="synthetic")


def read_vocabulary(folder: Path | None) -> Vocabulary:
    """The synthetic vocabulary, or a tokenizer's."""
    if folder is None:
        return synthetic()
    tokenizer = Tokenizer.load(folder)
    return make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def percentiles(values: Sequence[float], scale: float = 1e3) -> dict[str, float]:
    """p50, p95, p99 and the maximum."""
    ordered = sorted(values)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] * scale  # noqa: E731
    return {"p50": at(0.50), "p95": at(0.95), "p99": at(0.99), "max": ordered[-1] * scale}


class Bench:
    """The measurements that need no model."""

    def __init__(self, vocabulary: Vocabulary, num: int) -> None:
        self.vocabulary = vocabulary
        plan = make_plan(Registry.scan(), grammar_backend="auto")
        self.plugins = load(plan, "engine")
        self.service = GrammarService(self.plugins, lambda: vocabulary, timeout_s=5, cache_bytes=1 << 30)
        backends = {p.name: backend(vocabulary) for p, backend in self.plugins.candidates("grammar_backend")}
        self.router = Router(backends)
        self.specs = [GrammarSpec(kind=Kind.JSON, source=json.dumps(s)) for s in schemas(num)]
        self.service.warm_up()
        self.settle(self.service.request(self.router.route(self.specs[0], "x").steps))

    def settle(self, ticket: Any) -> Any:
        """Wait for a ticket as the engine does, without its other work."""
        while ticket.outcome is None:
            self.service.wait(0.002)
        return ticket.outcome

    def compile(self) -> tuple[dict[str, Any], list[Enforced]]:
        """New schemas and known ones: from the spec to a matcher in hand."""
        new, known, made, refused, full = [], [], [], 0, 0
        for spec in self.specs:
            started = time.perf_counter()
            try:
                route = self.router.route(spec, "json_schema")
            except RequestError:
                refused += 1
                continue
            outcome = self.settle(self.service.request(route.steps))
            if not isinstance(outcome, Enforced):
                refused += 1
                continue
            outcome.compiled.matcher()
            new.append(time.perf_counter() - started)
            started = time.perf_counter()
            again = self.service.request(route.steps)
            again.outcome.compiled.matcher()  # type: ignore[union-attr]
            known.append(time.perf_counter() - started)
            made.append(outcome)
            full += route.ways[outcome.step].enforcement == "full"
        figures = {"new schema (ms)": percentiles(new), "known schema (µs)": percentiles(known, 1e6)}
        return figures | {"accepted": len(made), "refused": refused, "exact": full}, made

    def masks(self, made: Sequence[Enforced], num_tokens: int = 60) -> dict[str, Any]:
        """One row's mask along random walks."""
        rng = random.Random(1)
        row = np.zeros((1, self.vocabulary.mask_words), dtype=np.int32)
        took = []
        for outcome in made:
            matcher = outcome.compiled.matcher()
            for _ in range(num_tokens):
                started = time.perf_counter()
                matcher.fill(row, 0)
                took.append(time.perf_counter() - started)
                allowed = [t for t in ids_of(row[0]) if t not in self.vocabulary.eos_ids]
                if not allowed or matcher.accept([rng.choice(allowed)]) != 1:
                    break
        return {"mask of a row (µs)": percentiles(took, 1e6), "masks": len(took)}

    def step(self, made: Sequence[Enforced], num_rows: int = 64) -> dict[str, Any]:
        """What a decode step pays on the host and for applying masks, all rows constrained."""
        sets = TokenSets(self.vocabulary)
        chosen = [made[i % len(made)] for i in range(num_rows)]
        constraints = [Constraint(sets, None, o.compiled.matcher(), o.backend) for o in chosen]
        buffer = MaskBuffer(self.vocabulary.mask_words, torch.device("cpu"))
        logits = torch.randn(num_rows, self.vocabulary.size)
        fills, applies = [], []
        for _ in range(20):
            started = time.perf_counter()
            mask = buffer.fill(constraints, [False] * num_rows)
            fills.append(time.perf_counter() - started)
            if mask is not None:
                mask.apply(logits)
            applies.append(time.perf_counter() - started - fills[-1])
        return {
            "fill, 64 rows (ms)": statistics.median(fills) * 1e3,
            "apply on CPU, 64 rows (ms)": statistics.median(applies) * 1e3,
        }


class Load:
    """A steady load on the demo model's engine, whose token times are watched while hostile grammars come."""

    def __init__(self) -> None:
        plan = make_plan(
            Registry.scan(), model="Qwen3ForCausalLM", attention_backend="auto", grammar_backend="auto", device="cpu"
        )
        self.client = InProcessClient(EngineSettings(model_path=str(MODEL_DIR), device="cpu"), plan)
        self.gaps: list[float] = []
        self.stop = threading.Event()

    async def background(self, number: int) -> None:
        """Generate until told to stop, noting the time between tokens."""
        count = 0
        while not self.stop.is_set():
            params = EngineParams(max_tokens=200, temperature=1.0, ignore_eos=True)
            last = None
            async for _ in self.client.submit(Submit(rid=f"b{number}-{count}", prompt_ids=[1, 2, 3], params=params)):
                now = time.perf_counter()
                if last is not None:
                    self.gaps.append(now - last)
                last = now
            count += 1

    async def hostile(self, number: int, step: GrammarStep) -> tuple[float, str]:
        """Send one hostile request; returns how long its answer took, and what it was."""
        started = time.perf_counter()
        params = EngineParams(max_tokens=30, temperature=1.0, seed=1)
        finish = None
        async for delta in self.client.submit(
            Submit(rid=f"h{number}", prompt_ids=[1, 2], params=params, grammar=(step,))
        ):
            finish = delta.finish
        return time.perf_counter() - started, f"{finish.reason} {finish.code or ''}" if finish is not None else "?"

    async def run(self) -> dict[str, Any]:
        """Measure the gaps without, then with hostile requests."""
        await self.client.start()
        await self.hostile(999, GrammarStep(backend="llguidance", kind="choice", source='["warm"]'))
        await self.hostile(998, GrammarStep(backend="outlines", kind="choice", source='["warm"]'))
        tasks = [asyncio.create_task(self.background(i)) for i in range(4)]
        await asyncio.sleep(5)
        quiet, self.gaps = percentiles(self.gaps), []
        answers = [await self.hostile(i, step) for i, step in enumerate(HOSTILE)]
        under_fire = percentiles(self.gaps)
        self.stop.set()
        await asyncio.gather(*tasks)
        await self.client.close()
        for step, (seconds, what) in zip(HOSTILE, answers, strict=True):
            print(f"  {seconds:6.2f} s  {what:28}  {step.backend} {step.kind} {step.source[:50]}")
        return {
            "gap between others' tokens, quiet (ms)": quiet,
            "the same under hostile grammars (ms)": under_fire,
            "added at p99 (ms)": under_fire["p99"] - quiet["p99"],
            "slowest answer (s)": max(seconds for seconds, _ in answers),
        }


def end_to_end(num: int) -> dict[str, Any]:
    """Random schemas through the demo model; every reply is valid JSON or was cut at its length."""
    made = schemas(num, seed=7, bounded=True)
    counts = {"valid": 0, "length": 0, "wrong": 0, "not full": 0}
    with LLM(reasoning_parser="qwen3", max_total_tokens=65536) as llm:
        for thinking in (False, True):
            half = made[::2] if thinking else made[1::2]
            params = [
                SamplingParams(json_schema=s, max_tokens=400, temperature=1.0, seed=i, thinking_budget=60)
                for i, s in enumerate(half)
            ]
            ask = [[{"role": "user", "content": "Tell me about France as JSON."}]] * len(half)
            kwargs = {"enable_thinking": thinking}
            if not thinking:
                params = [SamplingParams(**{**p.__dict__, "thinking_budget": None}) for p in params]
            for reply, schema in zip(llm.chat(ask, params, chat_template_kwargs=kwargs), half, strict=True):
                counts[judge(reply, schema)] += 1
                counts["not full"] += reply.grammar is None or reply.grammar.enforcement != "full"
    return counts


def judge(reply: Any, schema: dict[str, Any]) -> str:
    """Say what became of one reply."""
    if reply.finish_reason == "length":
        return "length"
    try:
        jsonschema.validate(json.loads(reply.text), schema)
    except (ValueError, jsonschema.ValidationError):
        print("wrong:", reply.finish_reason, reply.message, reply.text[:100], json.dumps(schema)[:200])
        return "wrong"
    return "valid"


def show(title: str, figures: dict[str, Any]) -> None:
    """Print figures as a table."""
    table = Table(title=title, show_header=False)
    for name, value in figures.items():
        if isinstance(value, dict):
            value = "  ".join(f"{key} {number:.3f}" for key, number in value.items())
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; a made-up vocabulary if not given")
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--hostile", action="store_true", help="measure hostile grammars beside a steady load")
    parser.add_argument(
        "--end-to-end", type=int, default=0, metavar="N", help="N random schemas through the demo model"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    parts: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    bench = Bench(read_vocabulary(args.tokenizer), args.schemas)
    figures["compile"], made = bench.compile()
    show(f"{args.schemas} schemas, {bench.vocabulary.size:,} tokens", figures["compile"])
    parts += [("masks", lambda: bench.masks(made)), ("step", lambda: bench.step(made))]
    if args.hostile:
        parts.append(("hostile", lambda: asyncio.run(Load().run())))
    if args.end_to_end:
        parts.append(("end to end", lambda: end_to_end(args.end_to_end)))
    for name, measure in parts:
        figures[name] = measure()
        show(name, figures[name])
    bench.service.close()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
