"""What grammars cost an engine's requests: the constrained ones per step, all others under hostile grammars."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.base.settings import EngineSettings
from dovetail.client import launch
from dovetail.client.inprocess import InProcessClient
from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarSpec, Vocabulary
from dovetail.demo import MODEL_DIR
from dovetail.engine.core import EngineCore
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.messages import GrammarOption, SamplerParams, Submit
from dovetail.plugins import LoadedPlugins, Registry, load, make_plan
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail_server.bench.grammar_masks import SETTLE_S, points

LONG = GrammarOption(
    backend="llguidance",
    kind="json",
    source=json.dumps(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tag": {"enum": ["a", "b"]}},
                "required": ["name", "age", "tag"],
                "additionalProperties": False,
            },
            "minItems": 1000,
        }
    ),
)
"""A text that does not end within a measurement."""
HOSTILE = [
    GrammarOption(backend="llguidance", kind="regex", source="[ab]*a[ab]{20}"),
    GrammarOption(backend="outlines", kind="regex", source="[ab]*a[ab]{20}"),
    GrammarOption(backend="llguidance", kind="regex", source="(x+x+)+y"),
    GrammarOption(backend="llguidance", kind="regex", source="a{100000}"),
    GrammarOption(backend="llguidance", kind="json", source=json.dumps({"enum": [f"v{i}" for i in range(100_000)]})),
    GrammarOption(backend="llguidance", kind="json", source='{"items":' * 10_000 + "{}" + "}" * 10_000),
    GrammarOption(backend="llguidance", kind="json", source='{"anyOf":[{"$ref":"#"},{"$ref":"#"}]}'),
    GrammarOption(backend="llguidance", kind="lark", source='start: (("a"~0..100)~0..100)~0..100'),
    GrammarOption(backend="outlines", kind="regex", source="(((a{0,60}b){0,60}c){0,60}d){0,60}"),
]
"""What a request could bring that nobody's checks had refused; sent past the server's own."""
WARM_S = 4.0


def make_engine(folder: Path, num_rows: int) -> tuple[EngineCore, LoadedPlugins]:
    """Load a model of the folder's shapes with random weights, on the device that the engine chooses."""
    model = ModelFolder.read(folder, weights=False).architecture
    registry, auto = Registry.scan(), "auto"
    plan = make_plan(registry, model=model, attention_backend=auto, grammar_backend=auto, checkpoint="dummy")
    plugins = load(plan, "engine")
    wanted = {
        "model_path": str(folder),
        "load_format": "dummy",
        "max_running_requests": num_rows,
        "max_total_tokens": num_rows * 256,
        "random_seed": 1,
    }
    core = launch.make_engine(EngineSettings.model_validate(wanted), plugins)
    while core.has_idle_tasks:
        core.run_idle_task()
    if core.grammars is not None:
        core.grammars.service.warm_up()
    return core, plugins


class StepBench:
    """An engine, stepped by hand."""

    def __init__(self, core: EngineCore, num_rows: int) -> None:
        self._core, self._num_rows = core, num_rows
        # On the CPU others share the machine; a GPU is waited for.
        self._on_cpu = core.info.device == "cpu"

    def run(self, rounds: int, num_steps: int = 8) -> dict[str, Any]:
        """Time steps of all rows with and without a grammar, in turns; the difference is what grammars cost."""
        self._time(LONG, num_steps)
        free: list[float] = []
        bound: list[float] = []
        for _ in range(rounds):
            free += self._time(None, num_steps)
            bound += self._time(LONG, num_steps)
        without, with_ = statistics.median(free), statistics.median(bound)
        unit = "CPU ms" if self._on_cpu else "ms"
        return {
            f"step without grammars, {unit}": without * 1e3,
            f"step with grammars, {unit}": with_ * 1e3,
            "added, µs per row": (with_ - without) * 1e6 / self._num_rows,
            "added": f"{with_ / without - 1:.1%}",
        }

    def _time(self, option: GrammarOption | None, num_steps: int) -> list[float]:
        core, clock = self._core, time.thread_time if self._on_cpu else time.perf_counter
        params = SamplerParams(max_tokens=num_steps + 4, temperature=0.0, ignore_eos=True, seed=1)
        for i in range(self._num_rows):
            grammar = () if option is None else (option,)
            core.handle(Submit(rid="", handle=i, prompt_ids=[i % 100, 1, 2], params=params, grammar=grammar))
        took = []
        while core.has_work:
            started = clock()
            tick = core.step()
            spent = clock() - started
            if len(tick.deltas) == self._num_rows and all(delta.finish is None for delta in tick.deltas):
                took.append(spent)
        return took[1:]


class HostileBench:
    """A steady load on the demo model's engine, whose token times are watched while hostile grammars come."""

    def __init__(self) -> None:
        """Prepare; the engine starts in `run`."""
        plan = make_plan(
            Registry.scan(), model="Qwen3ForCausalLM", attention_backend="auto", grammar_backend="auto", device="cpu"
        )
        self._client = InProcessClient(
            EngineSettings.model_validate({"model_path": str(MODEL_DIR), "device": "cpu"}), plan
        )
        self._gaps: list[float] = []
        self.answers: list[tuple[float, str, GrammarOption]] = []

    async def run(self) -> dict[str, Any]:
        """Measure the gaps between others' tokens without, then with hostile requests."""
        await self._client.start()
        for backend in ("llguidance", "outlines"):
            await self._hostile(-1, GrammarOption(backend=backend, kind="choice", source='["warm"]'))
        tasks = [asyncio.create_task(self._background(i)) for i in range(4)]
        await asyncio.sleep(WARM_S)
        quiet, self._gaps = points(self._gaps, 1e3), []
        self.answers = [await self._hostile(i, option) for i, option in enumerate(HOSTILE)]
        under_fire = points(self._gaps, 1e3)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._client.close()
        return {
            "between others' tokens, quiet, ms": quiet,
            "the same under hostile grammars, ms": under_fire,
            "added at p99, ms": under_fire["p99"] - quiet["p99"],
            "slowest answer, s": max(seconds for seconds, _, _ in self.answers),
        }

    async def _background(self, number: int) -> None:
        """Generate without end, noting the time between tokens."""
        count = 0
        while True:
            params = SamplerParams(max_tokens=200, temperature=1.0, ignore_eos=True)
            last = None
            stream = self._client.submit(Submit(rid=f"b{number}-{count}", prompt_ids=[1, 2, 3], params=params))
            async with contextlib.aclosing(stream):
                async for _ in stream:
                    now = time.perf_counter()
                    if last is not None:
                        self._gaps.append(now - last)
                    last = now
            count += 1

    async def _hostile(self, number: int, option: GrammarOption) -> tuple[float, str, GrammarOption]:
        """Send one hostile request; returns how long its answer took, and what it was."""
        started = time.perf_counter()
        params = SamplerParams(max_tokens=30, temperature=1.0, seed=1)
        finish = None
        submit = Submit(rid=f"h{number}-{option.backend}", prompt_ids=[1, 2], params=params, grammar=(option,))
        async for delta in self._client.submit(submit):
            finish = delta.finish
        what = "?" if finish is None else f"{finish.reason} {finish.code or ''}".strip()
        return time.perf_counter() - started, what, option


# What a new JSON schema adds to a first token: routed before the engine has it, compiled beside the prefill.


PROMPT_LEN = 64


class FirstTokenBench:
    """Requests to an engine that is stepped by hand, one at a time."""

    def __init__(self, core: EngineCore, plugins: LoadedPlugins) -> None:
        """Make the router as the API's process does: its backends know no tokens."""
        size = core.info.vocab_size
        nothing = Vocabulary(tokens=(), size=size, eos_ids=frozenset(), special_ids=frozenset(), fingerprint="")
        backends = plugins.candidates("grammar_backend")
        self._router = GrammarRouter({planned.name: backend(nothing) for planned, backend in backends})
        self._core = core
        self._count = 0

    def run(self, specs: Sequence[GrammarSpec]) -> dict[str, Any]:
        """Time a request without a grammar and one with a new schema, in turns; the first schema is not counted."""
        free: list[float] = []
        bound: list[float] = []
        for spec in specs:
            free.append(self._time(None))
            with contextlib.suppress(RequestError):  # no backend takes it
                bound.append(self._time(spec))
        without, with_ = points(free[1:], 1e3), points(bound[1:], 1e3)
        return {
            "first token without a grammar, ms": without,
            "first token with a new schema, ms": with_,
            "added at p50, ms": with_["p50"] - without["p50"],
            "added at p95, ms": with_["p95"] - without["p95"],
        }

    def _time(self, spec: GrammarSpec | None) -> float:
        """Seconds from the spec to the first token of a prompt that no cache knows."""
        core, size = self._core, self._core.info.vocab_size
        self._count += 1
        ids = [(self._count * 7919 + i) % min(size, 1000) for i in range(PROMPT_LEN)]
        params = SamplerParams(max_tokens=1, temperature=0.0)
        started = time.perf_counter()
        options: tuple[GrammarOption, ...] = (
            () if spec is None else self._router.route(spec, "json_schema").engine_options
        )
        core.handle(Submit(rid="", handle=self._count, prompt_ids=ids, params=params, grammar=options))
        while not core.step().deltas:
            pass
        took = time.perf_counter() - started
        while core.has_work:
            core.step()
        time.sleep(SETTLE_S)
        return took
