"""Long random loads through a real engine: aborts at every stage, and memory that nobody owns is poison.

DOVETAIL_SOAK is the number of requests of the first test, 140 if not given; 10,000 take some minutes.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.demo import MODEL_DIR
from dovetail.engine.core import EngineCore
from dovetail.engine.kv_cache_manager import KVCacheManager
from dovetail.engine.request import EngineRequest
from dovetail.messages import Abort, Finish, GrammarOption, SamplerParams, Submit
from dovetail_backends.triton import TritonBackend
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model

NUM_REQUESTS = int(os.environ.get("DOVETAIL_SOAK", "140"))
STAGES = ("waiting", "prefill", "decode", "retracted", "compiling", "constrained")


class Soak:
    """Keeps an engine busy, aborts, and looks at the book of pages after every step."""

    def __init__(self, core: EngineCore, seed: int) -> None:
        self.core = core
        self.rng = random.Random(seed)
        self.rids: dict[int, str] = {}
        self.finishes: dict[str, list[Finish]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.aborted: Counter[str] = Counter()
        self.probe = [self.rng.randrange(3, 500) for _ in range(40)]
        self.shared = [[self.rng.randrange(3, 500) for _ in range(70)] for _ in range(3)]

    @property
    def live(self) -> list[EngineRequest]:
        """Requests that have not ended."""
        return [*self.core.scheduler.waiting, *self.core.scheduler.running]

    def submit(self, number: int) -> None:
        """Send one request: a probe, one with a grammar, or anything."""
        rng = self.rng
        grammar: tuple[GrammarOption, ...] = ()
        rid = f"probe{number}" if number % 20 == 0 else str(number)
        self.rids[number] = rid
        self.finishes[rid], self.tokens[rid] = [], []
        if number % 20 == 0:
            prompt, params = self.probe, SamplerParams(max_tokens=8, temperature=0)
        else:
            prefix = rng.choice(self.shared)[: rng.randrange(70)] if rng.random() < 0.5 else []
            prompt = prefix + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 60))]
            temperature = rng.choice((0.0, 1.0))
            params = SamplerParams(max_tokens=rng.randrange(1, 24), temperature=temperature, ignore_eos=True)
        if number % 7 == 1 and not rid.startswith("probe"):
            source = f"[a-z]{{{rng.randrange(2, 40)},60}}"
            grammar = (GrammarOption(backend="llguidance", kind="regex", source=source),)
        salt = rng.choice(("", "", "a"))
        self.core.handle(
            Submit(
                rid=rid,
                handle=number,
                prompt_ids=prompt,
                params=params,
                grammar=grammar,
                priority=rng.randrange(2),
                cache_salt=salt,
            )
        )

    def abort(self) -> None:
        """Abort a request in the stage, of those that there are, in which the fewest were aborted so far."""
        by_stage: dict[str, list[EngineRequest]] = {}
        for request in self.live:
            if not request.rid.startswith("probe"):
                by_stage.setdefault(stage_of(request), []).append(request)
        if by_stage:
            stage = min(by_stage, key=lambda name: self.aborted[name])
            self.core.handle(Abort(self.rng.choice(by_stage[stage]).handle))
            self.aborted[stage] += 1

    def step(self) -> None:
        """Make a step and check the book."""
        for delta in self.core.step().deltas:
            rid = self.rids[delta.handle]
            self.tokens[rid] += delta.ids
            self.finishes[rid] += [delta.finish] if delta.finish is not None else []
        assert self.core.pages.check_counts(self.core.scheduler.running)
        assert self.core.pages.check_ownership(self.core.scheduler.running)

    def run(self, num: int) -> None:
        """Send so many requests and let all end."""
        sent = 0
        while sent < num or self.core.has_work:
            while sent < num and len(self.live) < 24:
                self.submit(sent)
                sent += 1
            self.core.scheduler.ratio.value = 0.0  # reserve nothing: the pool overflows often
            if self.rng.random() < 0.5:
                self.abort()
            self.step()


def stage_of(request: EngineRequest) -> str:
    """Where a request is."""
    if request.waiting_for_grammar:
        return "compiling"
    if request.row < 0:
        return "retracted" if request.num_retractions else "waiting"
    if not request.on_device:
        return "prefill"
    return "constrained" if request.constraint is not None else "decode"


@pytest.mark.first(1)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("overlap", [False, True])
def test_random_loads_with_aborts_at_every_stage_hold_nothing_in_the_end(overlap: bool) -> None:
    """Every request ends once, a probe among them never changes, and no page, row or grammar is held afterwards."""
    core = make_core(
        MODEL_DIR,
        grammar_backend="llguidance",
        max_total_tokens=480,
        context_length=160,
        page_size=8,
        max_running_requests=12,
        chunked_prefill_size=40,
        schedule_policy="priority",
        overlap_on_cpu=overlap,
        disable_overlap_schedule=not overlap,
    )
    try:
        soak = Soak(core, seed=overlap)
        soak.run(NUM_REQUESTS // 2)
    finally:
        core.close()
    assert all(soak.aborted[stage] for stage in STAGES), soak.aborted
    probes = [rid for rid in soak.finishes if rid.startswith("probe")]
    assert {len(found) for found in soak.finishes.values()} == {1}
    assert len({tuple(soak.tokens[rid]) for rid in probes}) == 1
    assert (core.pages.num_used, len(core.rows.free)) == (0, 12)
    assert core.grammars is not None
    assert not core.grammars.is_waiting
    core.pages.flush()
    assert sorted(core.pages.allocators[0].free_pages) == list(range(1, core.pages.allocators[0].num_pages + 1))


def generate(core: EngineCore, prompts: Sequence[list[int]], after: Callable[[], None] = lambda: None) -> list[Any]:
    """Greedy tokens and cached tokens of all prompts; `after` is called after every step."""
    found: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    cached: dict[int, int] = {}
    for i, prompt in enumerate(prompts):
        params = SamplerParams(max_tokens=2, temperature=0, ignore_eos=True)
        core.handle(Submit(rid="", handle=i, prompt_ids=prompt, params=params))
    while core.has_work:
        for delta in core.step().deltas:
            assert delta.finish is None or delta.finish.reason == "length", delta.finish
            found[delta.handle] += delta.ids
            cached[delta.handle] = delta.cached_tokens
        after()
    return [list(found.values()), list(cached.values())]


@pytest.mark.parametrize("backend", ["torch_native", "triton"])
def test_pages_that_nobody_owns_never_reach_a_result(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free pages are NaN after every step, a page is wiped when it is handed out: tokens stay, with prefix hits too."""
    if backend == "triton":
        monkeypatch.setattr(TritonBackend, "caps", replace(TritonBackend.caps, devices=frozenset({"cpu"})))
        monkeypatch.setattr("dovetail.plugins.plan._why_not", lambda record, device: None)
    folder = make_model(tmp_path, "Qwen3ForCausalLM", num_hidden_layers=1, head_dim=16)
    small = {"max_total_tokens": 200, "page_size": 4, "chunked_prefill_size": 9, "attention_backend": backend}
    prefix = [(7 * i) % 190 for i in range(13)]
    waves = [[[*prefix, 1], [5]], [[*prefix, 1, 2], prefix[:9]]]
    plain = make_core(folder, **small)
    want = [generate(plain, wave) for wave in waves]
    assert max(want[1][1]) >= 12
    core = make_core(folder, **small)
    take = KVCacheManager._take

    def take_and_wipe(book: KVCacheManager, group: int, num: int) -> list[int]:
        pages = take(book, group, num)
        core.executor.runner.pool.zero_pages(group, pages)
        return pages

    def poison() -> None:
        free = list(core.pages.allocators[0].free_pages)
        for index in range(core.executor.runner.config.num_layers):
            core.executor.runner.pool.layer(index)[free] = math.nan

    monkeypatch.setattr(KVCacheManager, "_take", take_and_wipe)
    poison()
    assert [generate(core, wave, poison) for wave in waves] == want
    for made in (plain, core):
        made.close()
