"""What `structured_steps.py` asks for, and where it looks for time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from grammar_rows import TABLE, TOOL, table

from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.engine import core, grammar_manager, replies, request
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.messages import GrammarOption
from dovetail.plugins import Registry, load, make_plan
from dovetail.processing.constraints import RequestedGrammar
from dovetail.sdk.masks import draw_ids, has_bit
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_grammar.llguidance import LlguidanceBackend, LlguidanceMatcher
from dovetail_server.supervision.wire import SocketTransport

VOCAB, EOS = 151_936, 151_645


def grammars(tokenizer: Tokenizer) -> tuple[tuple[GrammarOption, ...], tuple[GrammarOption, ...]]:
    """The suite's schema, and its tool that must be called, routed as a server does."""
    plugins = load(make_plan(Registry.scan(), grammar_backend="auto", tool_parser="hermes"), "api")
    front = StructuredOutputs.load(plugins, tokenizer, VOCAB)
    try:
        schema = front.route(RequestedGrammar(GrammarSpec(kind=Kind.JSON, source=json.dumps(TABLE)), "json_schema"))
        parser = plugins.get("tool_parser", "hermes")()
        tools = front.tools(parser, "hermes", [TOOL], "required", parallel=True, param="tools")
        return schema.engine_options, tools.engine_options
    finally:
        front.close()


@dataclass
class Row:
    """A request as its device knows it: what it has said and launched, and how far that is in its text."""

    seed: int
    rng: random.Random
    said: list[int] = field(default_factory=list)
    num_launched: int = 0
    num_followed: int = 0
    at: int = 0
    is_lost: bool = False

    def any_of(self, mask: npt.NDArray[np.int32]) -> int:
        """Draw a token that a mask allows; looking at all of it only where few are."""
        for _ in range(12):
            token = self.rng.randrange(EOS)
            if has_bit(mask, token):
                return token
        return draw_ids(mask, 1, self.rng)[0]


class Texts:
    """Texts by the suite's schema, one for each seed, as a model would go on with them."""

    def __init__(self, tokenizer: Tokenizer, start: str) -> None:
        """`start` stands before each."""
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        self._vocabulary = make_vocabulary(tokenizer, VOCAB, tokenizer.eos_token_ids)
        self._names = {token_id: text.encode() for text, token_id in self._vocabulary.added.items()}
        self._start = start
        self._texts: dict[int, bytes] = {}
        self._ids: dict[tuple[int, int], int] = {}

    def following(self, row: Row) -> int | None:
        """Return the token that goes on, as the tokenizer cuts what is left; None where something else was said."""
        seed = row.seed
        text = self._texts.get(seed)
        if text is None:
            rng, rows = random.Random(seed), []
            for _ in range(4):
                rows += json.loads(table(rng))["rows"]
            text = self._start + json.dumps({"rows": rows}, ensure_ascii=False)
            text = self._texts[seed] = text.encode()
        for token in row.said[row.num_followed :]:
            piece = self._piece(token)
            row.is_lost = row.is_lost or not text.startswith(piece, row.at)
            row.at += len(piece)
        row.num_followed = len(row.said)
        if row.is_lost or row.at >= len(text):
            return None
        found = self._ids.get((seed, row.at))
        if found is None:
            at = row.at
            for token in self._encode(text[at:].decode(errors="ignore")):
                self._ids.setdefault((seed, at), token)
                at += len(self._piece(token))
            found = self._ids[seed, row.at]
        return found

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
        for name in ("schedule", "launching", "launched", "step_finished", "counted"):
            self._wrap(engine.scheduler, name, f"scheduler.{name}")
        self._wrap(engine._builder, "build", "build")
        self._wrap(engine, "step", "core.step, rest")
        self._wrap(engine._replies, "of", "replies.of, rest")
        self._wrap(engine._masks, "choose", "late masks, rest")
        for name in ("launch", "choose", "read"):
            self._wrap(executor, name, f"executor.{name} (model)")
        self._wrap(grammar_manager, "fill_masks", "fill_masks, rest")
        self._wrap(replies, "_delta", "delta")
        self._wrap(replies, "forced_tokens", "forced tokens")
        self._wrap(request.EngineRequest, "append_token", "append token")
        self._wrap(engine, "_report_cache", "cache report")
        self._wrap(LlguidanceBackend, "fill_batch", "fill_batch, rest")
        self._wrap(LlguidanceBackend, "_compute", "fill_batch, library")
        self._wrap(LlguidanceMatcher, "_consume", "library hears of tokens")
        self._wrap(SocketTransport, "send", "send")
        self._wrap(SocketTransport, "poll", "poll")

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

    def notify(self) -> None:
        """Print, and look no more."""
        for undo in reversed(self._undo):
            undo()
        steps = self._calls.get("core.step, rest", 1)
        for label, took in sorted(self._took.items(), key=lambda item: -item[1]):
            print(f"      {label:28} {1e6 * took / steps:8.1f} µs a step  {self._calls[label] / steps:6.2f} calls")
