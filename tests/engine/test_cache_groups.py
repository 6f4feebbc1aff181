"""An engine whose cache has two groups: tokens are right, hits equal misses, and windows give their pages back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example_models import Example, prompt, run

from dovetail.contracts.errors import ConfigError
from dovetail.messages import SamplerParams, Submit

LONG = prompt(200, 3)
WINDOW = 24
EXAMPLE = Example("two-widths", "TwoWidthsForCausalLM")
load_reference, make_engine, right = EXAMPLE.reference, EXAMPLE.make_engine, EXAMPLE.right


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model: every other layer has a window of 24 and heads half as wide."""
    made: Path = load_reference().write_checkpoint(tmp_path_factory.mktemp("two"), num_hidden_layers=2)
    return made


SCHEDULES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "short chunks": {"chunked_prefill_size": 7},
    "one token a page": {"page_size": 1, "chunked_prefill_size": 16},
    "pages as wide as the window": {"page_size": WINDOW},
    "overlapped": {"overlap_on_cpu": True},
    "without a tree": {"disable_radix_cache": True},
    "hardly any room": {"max_total_tokens": 220, "chunked_prefill_size": 16},
}
OFTEN = ("short chunks", "overlapped", "pages as wide as the window", "hardly any room")


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.full) for name in SCHEDULES]
)
def test_tokens_equal_the_reference(schedule: str, folder: Path) -> None:
    """In any schedule, with prefixes that are shared, requests longer than the window, and retractions."""
    core = make_engine(folder, **SCHEDULES[schedule])
    prompts = [prompt(n, n) for n in (1, 23, 24, 25, 60, 130)] + [LONG[:40] + prompt(5, 1), LONG[:40] + prompt(9, 2)]
    for given, tokens in zip(prompts, run(core, prompts, 30), strict=True):
        assert tokens == right(folder, given, tokens)
    assert core.pages.num_used == 0
    if schedule == "hardly any room":
        assert core.pages.allocators[1].num_pages < core.pages.allocators[0].num_pages


@pytest.mark.sampled
@pytest.mark.parametrize("length", [63, 64, 65, 128])
@pytest.mark.parametrize("num_evicted", [0, 5, 11, 1000])
def test_a_hit_equals_a_miss(length: int, num_evicted: int, folder: Path) -> None:
    """Whatever windows were evicted before: the prefix found is one that can be gone on from, and tokens are right."""
    core = make_engine(folder)
    run(core, [LONG[:150]], 4)
    core.pages.make_room([0, core.pages.allocators[1].num_free + num_evicted])
    evicted = core.pages.tree.num_pages(1)
    asked = [LONG[:length] + prompt(6, length), LONG[: length + 1]]
    found = run(core, asked, 12)
    fresh = run(make_engine(folder, disable_radix_cache=True), asked, 12)
    assert found == fresh == [right(folder, *pair) for pair in zip(asked, found, strict=True)]
    assert (evicted == 0) == (num_evicted == 1000)


def test_a_hit_ends_at_a_window_that_is_there(folder: Path) -> None:
    """Without evictions the whole prefix is found; when only the last window of each node is left, that node's end."""
    core = make_engine(folder)
    run(core, [LONG[:150]], 1)
    tree, window = core.pages.tree, core.pages.tree.partial[1]
    assert tree.count(LONG[:129]) == 32
    core.pages.make_room([0, core.pages.allocators[1].num_free + window.num_pages - 17])
    assert (
        tree.count(LONG[:129]) == 32
    )  # a chunk ended there, as at 64 and 148: two of their windows have a page in common
    assert [4 * tree.count(LONG[:n]) for n in (63, 127, 149)] == [0, 64, 148]
    core.pages.make_room([0, core.pages.allocators[1].num_free + window.num_pages - 6])
    assert [4 * tree.count(LONG[:n]) for n in (129, 149)] == [0, 148]


def test_a_window_gives_its_pages_back(folder: Path) -> None:
    """While a request decodes it holds the pages of its window and a few more, however long it is."""
    core = make_engine(folder, disable_radix_cache=True)
    assert core.pages.allocators[1].num_pages < core.pages.allocators[0].num_pages
    held: list[tuple[int, int]] = []
    look = core.scheduler.counted

    def counted(plan: Any) -> None:
        look(plan)
        held.append((core.pages.num_held[0], core.pages.num_held[1]))

    core.scheduler.counted = counted  # type: ignore[method-assign]
    run(core, [LONG], 100)
    full, windows = zip(*held, strict=True)
    assert max(full) == 75
    assert max(windows[:4]) <= WINDOW // 4 + 2 + 2 * 64 // 4
    assert set(windows[4:]) <= {6, 7, 8}
    assert core.pages.num_held == [0, 0]


def test_more_requests_fit_than_their_windows_would_without_giving_back(folder: Path) -> None:
    """All rows decode at once in a pool of windows that holds a fraction of their tokens; nobody is retracted."""
    core = make_engine(folder, max_total_tokens=4096, max_running_requests=8)
    asked = [prompt(180, n) for n in range(8)]
    pages = core.pages.allocators[1].num_pages
    assert pages * 4 < 8 * 180 / 2
    found = run(core, asked, 40)
    assert found == [right(folder, *pair) for pair in zip(asked, found, strict=True)]


def test_windows_alone_bound_no_request(tmp_path: Path) -> None:
    """Without a layer that sees everything, requests may be longer than what the cache holds."""
    kinds = {"layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2}
    folder = load_reference().write_checkpoint(tmp_path, **kinds)
    core = make_engine(folder, max_total_tokens=600, chunked_prefill_size=16)
    assert core.pages.allocators[0].num_pages * 4 < 400
    asked = [prompt(450, n) for n in range(3)] + [prompt(30, 9)]
    found = run(core, asked, 20)
    assert found == [right(folder, *pair) for pair in zip(asked, found, strict=True)]
    again = run(core, asked[:1], 20)
    assert again == found[:1]
    core.pages.flush()
    assert list(core.pages.tree.nodes()) == []


@pytest.mark.parametrize("room", [28, 40], ids=lambda room: f"{room} tokens")
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_prompts_do_not_wait_for_one_anothers_windows(room: int, overlap: bool, tmp_path: Path) -> None:
    """Where the cache has less than all rows see, those who came last give way; a request must fit."""
    kinds = {"layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2}
    folder = load_reference().write_checkpoint(tmp_path, **kinds)
    core = make_engine(folder, max_total_tokens=room, chunked_prefill_size=4, overlap_on_cpu=overlap)
    assert core.info.context_len == (28 if room == 28 else 512)
    asked = [prompt((20 if room == 28 else 60) - n, n) for n in range(4)]
    found: list[list[int]] = [[] for _ in asked]
    for handle, ids in enumerate(asked):  # of several users, who take turns
        params = SamplerParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        core.handle(Submit(rid="", handle=handle, prompt_ids=ids, params=params, owner=str(handle)))
    for _ in range(1000):
        for delta in core.step().deltas if core.has_work else ():
            found[delta.handle] += delta.ids
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    assert list(map(len, found)) == [8] * len(asked)
    assert found == [right(folder, *pair) for pair in zip(asked, found, strict=True)]


INTERPRETED = """
from dataclasses import replace

from dovetail_backends.triton import TritonBackend


class Interpreted(TritonBackend):
    plugin_name = "interpreted"
    caps = replace(TritonBackend.caps, devices=frozenset({"cpu", "cuda"}))
"""


def test_triton_serves_both_groups(folder: Path, tmp_path: Path) -> None:
    """Its kernels, in the interpreter, over two pools with page ids of their own."""
    file = tmp_path / "interpreted_triton.py"
    file.write_text(INTERPRETED)
    core = make_engine(folder, [file], attention_backend="interpreted", page_size=16)
    asked = [prompt(40, 5), prompt(9, 6)]
    found = run(core, asked, 2)
    assert found == [right(folder, *pair) for pair in zip(asked, found, strict=True)]
    assert core.executor.runner.chosen.label == "interpreted"


def test_layers_may_share_a_cache(tmp_path: Path) -> None:
    """Layers without keys and values read those of others, in both groups, over cached prefixes too; for no memory."""
    types = ["sliding_attention", "full_attention"] * 2
    folder = load_reference().write_checkpoint(tmp_path / "a", layer_types=types, num_kv_shared_layers=2)
    core = make_engine(folder, chunked_prefill_size=16)
    asked = [LONG[:70], prompt(50, 4)]
    first = run(core, asked, 20)
    again = run(core, [LONG[:70] + prompt(3, 3)], 20)
    for given, tokens in zip([*asked, LONG[:70] + prompt(3, 3)], [*first, *again], strict=True):
        assert tokens == right(folder, given, tokens)
    assert core.pages.tree.count(LONG[:69]) == 17
    own = load_reference().write_checkpoint(tmp_path / "b", layer_types=types[:2], num_hidden_layers=2)
    assert core.executor.info.kv_bytes == make_engine(own, chunked_prefill_size=16).executor.info.kv_bytes


def test_what_does_not_fit_ends_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, before weights are read."""
    monkeypatch.setattr("dovetail.runtime.checkpoint.weights.load_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match=r"--max-total-tokens \d+ takes .* lower it"):
        make_engine(folder, max_total_tokens=1 << 40)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_a_beginning_that_was_computed_early_is_gone_on_from(overlap: bool, folder: Path) -> None:
    """Its last window is there: the request computes the rest alone, and its tokens are right."""
    core = make_engine(folder, overlap_on_cpu=overlap, disable_overlap_schedule=not overlap, chunked_prefill_size=32)
    lens: list[int] = []
    launching = core.scheduler.launching
    core.scheduler.launching = lambda plan: lens.append(plan.num_prefill_tokens) or launching(plan)
    params = SamplerParams(max_tokens=1)
    for handle, num in ((-1, 50), (-2, 99)):  # nobody hears of them
        core.handle(Submit(rid="", handle=handle, prompt_ids=LONG[:num], params=params, prefill_only=True))
    [tokens] = run(core, [LONG[:150]], 12)
    assert tokens == right(folder, LONG[:150], tokens)
    assert sum(lens) == 150
    assert core.pages.num_used == 0
