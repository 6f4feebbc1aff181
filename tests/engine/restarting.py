"""Engines in processes of their own that are disturbed, and streams that are read meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dovetail.base.settings import EngineSettings
from dovetail.demo import MODEL_DIR
from dovetail.messages import GrammarOption, SamplerParams, Submit, TokenDelta
from dovetail.plugins import Registry, make_plan
from dovetail_server.supervision.engine_process import ProcessClient, Restarts

JSON_STEP = GrammarOption(
    backend="llguidance",
    kind="json",
    source=json.dumps({"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(8)}}),
)
LETTERS = GrammarOption(backend="llguidance", kind="regex", source="([a-z]{3} ){10,90}")


def make_engine(restarts: Restarts | None = None, **changes: Any) -> ProcessClient:
    """The demo model in float32, in a process of its own."""
    settings = EngineSettings(model_path=str(MODEL_DIR), device="cpu", max_total_tokens=32768, num_threads=1, **changes)
    plan = make_plan(
        Registry.scan(),
        model="Qwen3ForCausalLM",
        attention_backend="auto",
        grammar_backend="llguidance",
        device="cpu",
    )
    return ProcessClient(settings, plan, log_level="error", restarts=restarts)


def make_scripted(restarts: Restarts | None = None) -> ProcessClient:
    """A process that starts in a moment; see `scripted_engine`."""
    client = make_engine(restarts)
    client.command = (str(Path(__file__).with_name("scripted_engine.py")),)
    return client


def plain(num: int, max_tokens: int = 300) -> list[Submit]:
    """Requests for a scripted engine, each with a reply of its own."""
    params = SamplerParams(max_tokens=max_tokens)
    return [Submit(rid=str(i), prompt_ids=[i, 1], params=params) for i in range(num)]


def mixed(num: int, max_tokens: int = 160) -> list[Submit]:
    """Requests of every sort: greedy, seeded, with penalties, log probabilities, bias, minimum lengths, grammars."""
    sorts: list[tuple[dict[str, Any], tuple[GrammarOption, ...]]] = [
        ({"temperature": 0.0}, ()),
        ({"seed": 3, "top_p": 0.9}, ()),
        ({"seed": 4, "frequency_penalty": 0.7, "repetition_penalty": 1.2}, ()),
        ({"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}, ()),
        ({"seed": 5, "ignore_eos": False, "min_tokens": 60, "logit_bias": {5: 3.0}}, ()),
        ({"seed": 6, "ignore_eos": False}, (JSON_STEP,)),
        ({"temperature": 0.0, "ignore_eos": False}, (LETTERS,)),
    ]
    found = []
    for i in range(num):
        params, grammar = sorts[i % len(sorts)]
        prompt = [(13 * i + 7 * j) % 900 + 10 for j in range(9 + i % 40)]
        all_params = SamplerParams(**{"max_tokens": max_tokens, "ignore_eos": True, **params})
        found.append(Submit(rid=str(i), prompt_ids=prompt, params=all_params, grammar=grammar))
    return found


class Reading:
    """Reads streams, and tells how far they are."""

    def __init__(self, client: ProcessClient, submits: Sequence[Submit]) -> None:
        self.deltas: list[list[TokenDelta]] = [[] for _ in submits]
        self._tasks = [asyncio.create_task(self._read(client, i, submit)) for i, submit in enumerate(submits)]

    async def _read(self, client: ProcessClient, at: int, submit: Submit) -> None:
        async for delta in client.submit(submit):
            self.deltas[at].append(msgspec.structs.replace(delta, ids=list(delta.ids)))

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.ids) for deltas in self.deltas for delta in deltas)

    async def reach(self, num_tokens: int) -> None:
        """Wait for so many tokens in all."""
        while self.num_tokens < num_tokens and not all(task.done() for task in self._tasks):
            await asyncio.sleep(0.005)

    async def end(self) -> list[tuple[Any, ...]]:
        """Wait for all; what a client sees of each."""
        await asyncio.gather(*self._tasks)
        return [shown(deltas) for deltas in self.deltas]


def shown(deltas: list[TokenDelta]) -> tuple[Any, ...]:
    ids = [i for delta in deltas for i in delta.ids]
    logged = [row.token_id for delta in deltas for row in delta.logprobs or ()]
    prompts = [len(delta.prompt_logprobs) for delta in deltas if delta.prompt_logprobs is not None]
    last = deltas[-1]
    return ids, logged, prompts, last.finish, last.grammar_option, last.prompt_tokens


async def ready(client: ProcessClient) -> None:
    """Wait until the engine is back."""
    deadline = time.monotonic() + 120
    while client.restarting is not None or client.dead is not None:
        assert client.dead is None, client.dead
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def kill(client: ProcessClient, sent: signal.Signals = signal.SIGKILL) -> None:
    """Send the engine a signal; for SIGKILL, wait until its client knows."""
    assert client.pid is not None
    before = client.pid
    with contextlib.suppress(ProcessLookupError):  # it may die of something else at this moment
        os.kill(before, sent)
    while sent == signal.SIGKILL and client.pid == before and client.restarting is None and client.dead is None:
        await asyncio.sleep(0.005)
