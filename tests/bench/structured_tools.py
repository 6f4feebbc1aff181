"""What `structured_steps.py` asks for, and where it looks for time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from grammar_rows import table

from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.engine import core, late_masks, replies, request
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.grammar.structured_outputs import StructuredOutputs
from dovetail.messages import GrammarOption
from dovetail.plugins import Registry, load, make_plan
from dovetail.processing.constraints import RequestedGrammar
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.bench.workloads import TABLE, TOOL

VOCAB = 151_936


def grammars(tokenizer: Tokenizer) -> tuple[tuple[GrammarOption, ...], tuple[GrammarOption, ...]]:
    """The suite's schema, and its tool that must be called, routed as a server does."""
    plugins = load(make_plan(Registry.scan(), grammar_backend="auto", tool_parser="hermes"), "api")
    front = StructuredOutputs.load(plugins, tokenizer, VOCAB)
    try:
        schema = front.route(RequestedGrammar(GrammarSpec(kind=Kind.JSON, source=json.dumps(TABLE)), "json_schema"))
        parser = plugins.get("tool_parser", "hermes")()
        tools = front.tools(parser, "hermes", [TOOL], "required", parallel=True, param="tools")
        return schema.steps, tools.steps
    finally:
        front.close()


class Texts:
    """Texts by the suite's schema, one for each seed, as a model would go on with them."""

    def __init__(self, tokenizer: Tokenizer, start: str) -> None:
        """`start` stands before each."""
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        self._vocabulary = make_vocabulary(tokenizer, VOCAB, tokenizer.eos_token_ids)
        self._names = {token_id: text.encode() for text, token_id in self._vocabulary.added.items()}
        self._start = start
        self._texts: dict[int, bytes] = {}
        self._ids: dict[tuple[int, int], list[int]] = {}

    def following(self, seed: int, said: Sequence[int]) -> int | None:
        """Return the token that goes on, as the tokenizer cuts what is left; None where something else was said."""
        text = self._texts.get(seed)
        if text is None:
            rng, rows = random.Random(seed), []
            for _ in range(4):
                rows += json.loads(table(rng))["rows"]
            text = self._start + json.dumps({"rows": rows}, ensure_ascii=False)
            text = self._texts[seed] = text.encode()
        done = b"".join(self._piece(token) for token in said)
        if not text.startswith(done) or len(done) == len(text):
            return None
        ids = self._ids.get((seed, len(done)))
        if ids is None:
            ids = self._encode(text[len(done) :].decode(errors="ignore"))
            at = len(done)
            for place, token in enumerate(ids):
                self._ids.setdefault((seed, at), ids[place:])
                at += len(self._piece(token))
        return ids[0]

    def _piece(self, token: int) -> bytes:
        return self._names.get(token) or self._vocabulary.tokens[token]


class Profile:
    """Exclusive processor time of some functions, by call; it adds about a microsecond to each."""

    def __init__(self) -> None:
        self._took: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._stack: list[float] = []
        self._undo: list[Callable[[], None]] = []
        self._from: tuple[float, int] = (0.0, 0)

    def watch(self, engine: core.EngineCore, executor: Any) -> None:
        """Look at an engine."""
        cls: Any
        for name in ("schedule", "launching", "launched", "step_finished", "counted"):
            self._wrap(engine.scheduler, name, f"scheduler.{name}")
        self._wrap(engine._builder, "build", "build")
        self._wrap(engine, "step", "core.step, rest")
        self._wrap(engine._replies, "of", "replies.of, rest")
        self._wrap(engine._masks, "choose", "late masks, rest")
        for name in ("launch", "choose", "read"):
            self._wrap(executor, name, f"executor.{name} (model)")
        self._wrap(late_masks, "fill_masks", "fill_masks, rest")
        self._wrap(replies, "_delta", "delta")
        self._wrap(replies, "forced_tokens", "forced tokens")
        cls = request.Request
        self._wrap(cls, "take", "accept token")
        self._wrap(engine, "_report_cache", "cache report")
        assert engine.grammars is not None
        for backend in (
            engine.grammars.service._backends.values() if hasattr(engine.grammars.service, "_backends") else ()
        ):
            self._wrap(backend, "fill_batch", "fill_batch")

    def _wrap(self, owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)
        self._took[label], self._calls[label] = 0.0, 0

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            self._stack.append(0.0)
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                self._took[label] += took - self._stack.pop()
                self._calls[label] += 1
                if self._stack:
                    self._stack[-1] += took

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, inner))

    def tell(self) -> None:
        """Print, and look no more."""
        for undo in reversed(self._undo):
            undo()
        steps = self._calls.get("core.step, rest", 1)
        for label, took in sorted(self._took.items(), key=lambda item: -item[1]):
            print(f"      {label:28} {1e6 * took / steps:8.1f} µs a step  {self._calls[label] / steps:6.2f} calls")
