"""What a new JSON schema adds to a first token: routed before the engine has it, compiled beside the prefill."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarSpec, Vocabulary
from dovetail.engine.core import EngineCore
from dovetail.grammar.spec.route import GrammarRouter
from dovetail.messages import GrammarOption, SamplerParams, Submit
from dovetail.plugins import LoadedPlugins
from dovetail_server.bench.grammar_masks import SETTLE_S, points

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
