"""Ranks cannot drift apart: what each launches, prepares and draws is the first one's choice, whoever is slow."""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from restarting import mixed

from dovetail.base.settings import EngineSettings
from dovetail.client import launch
from dovetail.demo import MODEL_DIR
from dovetail.executor import group
from dovetail.executor.local import LocalExecutor
from dovetail.messages.step import GraphKey, PrepareResult
from dovetail.plugins import Registry, load, make_plan

LEFT = {0: 5, 1: 2}
"""Preparations that each rank believes are left to do: the first one's belief counts."""


def digest_of(value: object) -> str:
    """A hash of a message, whatever arrays and structs it is made of."""
    return hashlib.sha256("".join(_flat(value)).encode()).hexdigest()


def _flat(value: Any) -> list[str]:
    if isinstance(value, np.ndarray):
        return [str((value.dtype, value.shape)), value.tobytes().hex()]
    if isinstance(value, msgspec.Struct):
        return [
            type(value).__name__,
            *(part for name in value.__struct_fields__ for part in _flat(getattr(value, name))),
        ]
    if isinstance(value, tuple | list):
        return ["[", *(part for item in value for part in _flat(item)), "]"]
    return [repr(value)]


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[str, str]]]:
    """What each rank did, in its order, and what came of it. The second one is slow."""
    seen: dict[int, list[tuple[str, str]]] = defaultdict(list)

    def recorded(name: str, what: Callable[..., object]) -> None:
        plain = getattr(LocalExecutor, name)

        def method(self: LocalExecutor, *args: Any) -> Any:
            number = len(seen[self._rank])
            if self._rank == 1 and (number < 3 or number % 16 == 5):
                time.sleep(0.05)
            done = plain(self, *args)
            seen[self._rank].append((name, digest_of(what(self, done, *args))))
            return done

        monkeypatch.setattr(LocalExecutor, name, method)

    left = dict(LEFT)

    def prepared(self: LocalExecutor, captured: tuple[GraphKey, ...]) -> PrepareResult:
        left[self._rank] = max(0, left[self._rank] - 1)
        return PrepareResult(
            captured=captured, num_left=left[self._rank], max_prefill_tokens=self.runner.max_prefill_tokens
        )

    monkeypatch.setattr(LocalExecutor, "_prepared", prepared)
    monkeypatch.setattr(group, "start_seconds", lambda settings: 60.0)
    recorded("launch", lambda self, done, step: step)
    recorded("choose", lambda self, done, late: (late, self.runner.masks.lend(int((late.mask_of >= 0).sum())).copy()))
    recorded("read", lambda self, done: (done.num, done.tokens, done.finite, self.stepper._state.lens))
    recorded("prepare", lambda self, done, key=None: key)
    return seen


@pytest.mark.full
@pytest.mark.usefixtures("in_threads")
def test_launches_draws_and_preparations_are_equal_on_all_ranks(journal: dict[int, list[tuple[str, str]]]) -> None:
    """Requests of every sort, with grammars, retractions and prefixes: hash by hash, though one rank is slow, and of
    another mind about what is left to prepare."""
    plan = make_plan(
        Registry.scan(), model="Qwen3ForCausalLM", attention_backend="auto", grammar_backend="llguidance", device="cpu"
    )
    settings = EngineSettings(
        model_path=str(MODEL_DIR), dtype="float32", device="cpu", page_size=4, max_total_tokens=120,
        max_running_requests=6, chunked_prefill_size=24, num_threads=1, tensor_parallel_size=2,
    )  # fmt: skip
    core = launch.make_engine(settings, load(plan, "engine"))
    try:
        for number, submit in enumerate(mixed(7, 30), 1):
            core.handle(msgspec.structs.replace(submit, handle=number))
        while core.has_work:
            core.step()
    finally:
        core.close()
    assert journal[0] == journal[1]
    names = [name for name, _ in journal[0]]
    assert names[: LEFT[0]].count("prepare") == LEFT[0] - 1
    assert names.count("launch") == names.count("read") > 50
    assert names.count("choose") > 5
