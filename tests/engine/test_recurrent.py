"""An engine with recurrent layers: tokens are right in any schedule, hits equal misses, copies are what prefill has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from example_models import Example, prompt, run

from dovetail.contracts.errors import ConfigError
from dovetail.engine.core import EngineCore

EXAMPLE = Example("recurrent", "RecurrentForCausalLM")
LONG = prompt(200, 3)
GRID = 8


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model: two recurrent layers around one that looks back; eight tokens are folded in at once."""
    made: Path = EXAMPLE.reference().write_checkpoint(tmp_path_factory.mktemp("recurrent"))
    return made


SCHEDULES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "chunks shorter than what is folded at once": {"chunked_prefill_size": 7},
    "one token a page": {"page_size": 1, "chunked_prefill_size": 16},
    "pages that are no multiple": {"page_size": 12},
    "overlapped": {"overlap_on_cpu": True},
    "without a tree": {"disable_radix_cache": True},
    "hardly any room": {"max_total_tokens": 200, "chunked_prefill_size": 16},
    "overlapped, hardly any room": {"max_total_tokens": 200, "chunked_prefill_size": 16, "overlap_on_cpu": True},
}
OFTEN = (
    "pages that are no multiple",
    "without a tree",
    "overlapped, hardly any room",
    "chunks shorter than what is folded at once",
)


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.full) for name in SCHEDULES]
)
def test_tokens_equal_the_reference(schedule: str, folder: Path) -> None:
    """In any schedule, with prefixes that are shared, and retractions."""
    core = EXAMPLE.make_engine(folder, **SCHEDULES[schedule])
    prompts = [prompt(n, n) for n in (1, 7, 8, 9, 60, 130)] + [LONG[:40] + prompt(n, n) for n in (5, 9, 11)]
    for given, tokens in zip(prompts, run(core, prompts, 30), strict=True):
        assert tokens == EXAMPLE.right(folder, given, tokens)
    assert core.pages.num_used == 0
    assert core.pages.num_held == [0, 0]


@pytest.mark.sampled
@pytest.mark.parametrize("length", [63, 64, 65, 128])
@pytest.mark.parametrize("num_evicted", [0, 1, 1000])
def test_a_hit_equals_a_miss(length: int, num_evicted: int, folder: Path) -> None:
    """Whatever copies were evicted before: what is found can be gone on from, and tokens are right."""
    core = EXAMPLE.make_engine(folder)
    run(core, [LONG[:150]], 4)
    core.pages.make_room([0, core.pages.allocators[1].num_free + num_evicted])
    asked = [LONG[:length] + prompt(6, length), LONG[: length + 1]]
    found = run(core, asked, 12)
    assert found == run(EXAMPLE.make_engine(folder, disable_radix_cache=True), asked, 12)
    assert found == [EXAMPLE.right(folder, *pair) for pair in zip(asked, found, strict=True)]


def hit(core: EngineCore, ids: Sequence[int]) -> int:
    """Tokens that a request would find."""
    return core.pages.tree.count(ids) * core.pages.page_size


def test_copies_stand_where_others_may_go_on(folder: Path) -> None:
    """At ends of chunks, at the last place of a prompt, and where a prompt parted from others."""
    core = EXAMPLE.make_engine(folder)
    run(core, [LONG[:150]], 1)
    assert [hit(core, LONG[:n]) for n in (63, 64, 127, 128, 143, 144, 149, 200)] == [0, 64, 64, 128, 128, 144, 144, 144]
    run(core, [LONG[:100] + prompt(20, 1)], 1)
    assert hit(core, LONG[:110]) == 96
    whole = LONG[:100] + prompt(20, 1)
    assert [hit(core, whole[:n]) for n in (119, 120)] == [112, 120]
    run(core, [LONG[:109]], 1)
    assert [hit(core, LONG[:n]) for n in (103, 104)] == [96, 104]


def test_a_burst_behind_one_prefix_computes_it_twice_at_most(folder: Path) -> None:
    """The first leaves no copy where the others part from it; one of them does, and the rest begin there."""
    core = EXAMPLE.make_engine(folder, max_running_requests=8, max_total_tokens=4096)
    computed: list[int] = []
    build = core._builder.build

    def counted(plan: Any) -> Any:
        computed.append(plan.num_prefill_tokens)
        return build(plan)

    core._builder.build = counted  # type: ignore[method-assign]
    asked = [LONG[:60] + prompt(9, n) for n in range(8)]
    found = run(core, asked, 4)
    assert found == [EXAMPLE.right(folder, *pair) for pair in zip(asked, found, strict=True)]
    assert sum(computed) == 2 * 69 + 6 * (69 - 56)


def states(core: EngineCore, row: int) -> dict[str, torch.Tensor]:
    """What a device row has, of all layers."""
    pool = core.executor.runner.pool.states[1]  # type: ignore[attr-defined]
    return {f"{i}.{name}": own[row].clone() for i in (0, 2) for name, own in pool.rows(i).items()}


def copies(core: EngineCore, copy: int) -> dict[str, torch.Tensor]:
    """What a copy has, of all layers."""
    pool = core.executor.runner.pool.states[1]  # type: ignore[attr-defined]
    return {f"{i}.{name}": own[pool._slot[i], copy].clone() for i in (0, 2) for name, own in pool._copies.items()}


@pytest.mark.parametrize("chunk", [8, 24, *(pytest.param(chunk, marks=pytest.mark.full) for chunk in (64, 256))])
def test_a_copy_is_what_prefill_has(chunk: int, folder: Path) -> None:
    """Byte for byte, in each tensor's own dtype, wherever chunks end: as in a row that stops there."""
    core = EXAMPLE.make_engine(folder, chunked_prefill_size=chunk, dtype="bfloat16", max_total_tokens=2000)
    run(core, [LONG[:150]], 1)
    pages, _ = core.pages.tree.match(LONG[:149])
    assert len(pages[0]) * 4 == 144
    kept = copies(core, pages[1][-1])
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16, torch.float32}
    other = EXAMPLE.make_engine(folder, dtype="bfloat16", disable_radix_cache=True, chunked_prefill_size=48)
    run(other, [LONG[:144]], 1)
    alone = next(found for found in (states(other, row) for row in range(4)) if any(x.any() for x in found.values()))
    for name, tensor in alone.items():
        assert torch.equal(tensor, kept[name]), name


def test_the_least_recent_copies_go_first(folder: Path) -> None:
    """And none that a request is about to begin with; requests that find no room for one do without."""
    core = EXAMPLE.make_engine(folder, max_total_tokens=1200)
    room = core.pages.allocators[1].num_pages
    asked = [prompt(20, 100 + n) for n in range(room + 3)]
    for one in asked:
        run(core, [one], 1)
    found = [hit(core, one) for one in asked]
    assert found == [0] * 3 + [16] * room
    run(core, [[*asked[3], 1]], 1)
    run(core, [prompt(20, 99)], 1)
    assert hit(core, asked[3]) == 16
    assert hit(core, asked[4]) == 0


def test_a_copy_is_pinned_until_it_is_loaded(folder: Path) -> None:
    """It cannot go between a request's admission and its first step, and can as soon as that is launched."""
    core = EXAMPLE.make_engine(folder, overlap_on_cpu=True)
    run(core, [LONG[:50]], 1)
    pinned: list[tuple[int, int]] = []
    launching, launched = core.scheduler.launching, core.scheduler.launched
    windows = core.pages.tree.partial[1]

    def before(plan: Any) -> None:
        pinned.append((0, windows.num_pinned))
        launching(plan)

    def after(plan: Any) -> None:
        launched(plan)
        pinned.append((1, windows.num_pinned))

    core.scheduler.launching, core.scheduler.launched = before, after  # type: ignore[method-assign]
    [tokens] = run(core, [LONG[:60]], 5)
    assert pinned[0] == (0, 1)
    assert {num for when, num in pinned if when == 1} == {0}
    assert tokens == EXAMPLE.right(folder, LONG[:60], tokens)


@pytest.mark.parametrize("tokens", [None, 64])
def test_a_declaration_that_does_not_fit_ends_the_start(
    tokens: int | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, before weights are read: states of all rows, and two copies at least."""
    monkeypatch.setattr("dovetail.runtime.checkpoint.weights.load_weights", lambda *_: pytest.fail("weights are read"))
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "conv_L_cache": 1 << 28}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"states of 7 rows and 2 copies take [\d,.]+ GiB; lower --max-running-req"):
        EXAMPLE.make_engine(tmp_path, max_total_tokens=tokens)
