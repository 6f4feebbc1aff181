"""Grammars that are ready before, during and after the step that computes their prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.demo import MODEL_DIR
from dovetail.engine.core import EngineCore
from dovetail.grammar.compile.cache import RejectedGrammar
from dovetail.grammar.compile.jobs import CompileFuture
from dovetail.grammar.compile.service import GrammarService
from dovetail.messages import GrammarOption, SamplerParams, Submit, TokenDelta
from dovetail_testing.engine import make_core

STEP = GrammarOption(backend="llguidance", kind="json", source=json.dumps({"enum": ["a word", "b word", 12]}))


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"])
def core(request: pytest.FixtureRequest) -> EngineCore:
    """An engine of the demo model with small pages."""
    return make_core(
        MODEL_DIR, grammar_backend="auto", overlap_on_cpu=request.param, page_size=4, max_total_tokens=2000
    )


@pytest.fixture
def known(core: EngineCore) -> CompileFuture:
    """The grammar, compiled: what a request gets whenever a test says so."""
    assert core.grammars is not None
    service = core.grammars.service
    future = service.request((STEP,))
    while not future.is_ready:
        service.wait(1)
    return future


class Late:
    """Tickets that stay open until told otherwise, in place of the service's."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.futures: list[CompileFuture] = []
        assert core.grammars is not None
        monkeypatch.setattr(core.grammars.service, "request", self._request)

    def _request(self, steps: Any, owner: str, **_: Any) -> CompileFuture:
        self.futures.append(CompileFuture())
        return self.futures[-1]


NAMES = ["g", "f", "f0", "f1"]
"""Of requests, by handle."""


def submit(core: EngineCore, rid: str, length: int, *, free: bool = False) -> None:
    """A prompt of so many tokens."""
    params = SamplerParams(max_tokens=12, temperature=0.0, ignore_eos=free)
    ids = [(7 * i + length) % 90 + 4 for i in range(length)]
    core.handle(
        Submit(rid=rid, handle=NAMES.index(rid), prompt_ids=ids, params=params, grammar=() if free else (STEP,))
    )


def run(core: EngineCore) -> dict[str, list[int]]:
    """Step until nothing is left; the books are right after every step."""
    found: dict[str, list[int]] = {}
    while core.has_work:
        collect(core.step().deltas, found)
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    return found


def collect(deltas: list[TokenDelta], found: dict[str, list[int]]) -> None:
    for delta in deltas:
        found.setdefault(NAMES[delta.handle], []).extend(delta.ids)


def test_a_grammar_that_is_ready_in_time_costs_no_step(
    core: EngineCore, known: CompileFuture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's last token is computed with the others: the first token comes as soon as without a grammar."""
    late = Late(core, monkeypatch)
    launch: Callable[..., Any] = core.executor.stepper.launch

    def compiled_meanwhile(plan: Any) -> Any:
        launched = launch(plan)
        for future in late.futures:
            future.fill(known.outcome)
        return launched

    monkeypatch.setattr(core.executor.stepper, "launch", compiled_meanwhile)
    submit(core, "g", 16)
    submit(core, "f", 16, free=True)
    found: dict[str, list[int]] = {}
    while "f" not in found:
        collect(core.step().deltas, found)
    assert len(found["g"]) >= 1


@pytest.mark.sampled
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("company", [0, 2])
def test_a_grammar_that_comes_late_changes_nothing_but_the_time(
    core: EngineCore, known: CompileFuture, length: int, company: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that end within a page and with it, alone and beside others: the reply is that of a known grammar."""
    submit(core, "g", length)
    want = run(core)["g"]
    core.pages.flush()
    late = Late(core, monkeypatch)
    for i in range(company):
        submit(core, f"f{i}", 10 + i, free=True)
    submit(core, "g", length)
    found: dict[str, list[int]] = {}
    for _ in range(5):
        collect(core.step().deltas, found)
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    assert "g" not in found
    [request] = [r for r in core.scheduler.running if r.rid == "g"]
    assert request.computed_len == length - 1  # the rest is done while it waits
    late.futures[0].fill(known.outcome)
    found |= {rid: found.get(rid, []) + ids for rid, ids in run(core).items()}
    assert found["g"] == want
    assert all(len(found[f"f{i}"]) == 12 for i in range(company))
    assert core.pages.num_used == 0
    assert core.pages.tree.num_pages() == core.pages.tree.num_evictable


def test_a_grammar_that_is_refused_late_ends_its_request_alone(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused while the prompt's step is under way: the request ends with the reason, its neighbour goes on."""
    late = Late(core, monkeypatch)
    launch: Callable[..., Any] = core.executor.stepper.launch

    def refused_meanwhile(plan: Any) -> Any:
        launched = launch(plan)
        for future in late.futures:
            future.fill(RejectedGrammar("no such thing", "invalid_grammar"))
        return launched

    monkeypatch.setattr(core.executor.stepper, "launch", refused_meanwhile)
    submit(core, "g", 16)
    submit(core, "f", 16, free=True)
    deltas: list[TokenDelta] = []
    while core.has_work:
        deltas += core.step().deltas
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    [end] = [delta.finish for delta in deltas if NAMES[delta.handle] == "g"]
    assert end is not None
    assert end.code == "invalid_grammar"
    assert sum(len(delta.ids) for delta in deltas if NAMES[delta.handle] == "f") == 12


def test_nobody_waits_long_for_anothers_grammar(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a grammar is compiled, a step with others in it is sampled at once: the service is never waited for."""
    Late(core, monkeypatch)
    waits: list[float] = []
    monkeypatch.setattr(GrammarService, "wait", lambda self, timeout_s: waits.append(timeout_s))
    submit(core, "f", 10, free=True)
    submit(core, "g", 16)
    found: dict[str, list[int]] = {}
    while len(found.get("f", [])) < 12:
        collect(core.step().deltas, found)
    assert waits == []
    core.close()
