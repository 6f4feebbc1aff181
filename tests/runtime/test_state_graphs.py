"""Prompts of models with recurrent layers in captured graphs: the same bits, copies and hits as without.

On CPU, see `fake_graphs`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_graphs import make_captured, use_triton

from dovetail.contracts.errors import DovetailError
from dovetail.engine.core import EngineCore
from dovetail.messages import SamplerParams, Submit
from dovetail.messages.step import PrefillGraph, no_ints
from dovetail.runtime.graphs.batch import NO_TOKENS
from dovetail.sdk.layers.recurrent import recur

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))  # the checkpoints with weak decays
from delta_models import make_delta

SIZES = [PrefillGraph(32, 1), PrefillGraph(150, 1), PrefillGraph(150, 4), PrefillGraph(200, 4)]
SETTINGS: dict[str, Any] = {
    "page_size": 4,
    "chunked_prefill_size": 200,
    "max_running_requests": 5,
    "max_total_tokens": 8192,
    "dtype": "float32",
    "batch_invariant": True,
    "model_impl": "dovetail",
    "sizes": SIZES,
}
PARAMS = SamplerParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen3.5 with experts."""
    made = tmp_path_factory.mktemp("delta")
    make_delta(made, "qwen3_5_moe_text", max_position_embeddings=1024)
    return made


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineCore]:
    """Makes engines whose decode steps replay, and whose prompts do by default."""
    use_triton(monkeypatch)
    return lambda **changes: make_captured(folder, **{**SETTINGS, **changes})


def prompts() -> list[list[list[int]]]:
    """Turns of prompts that come together: alone, cut into chunks, behind one prefix, leaving it at several places."""
    rng = random.Random(3)

    def new(num: int) -> list[int]:
        return [rng.randrange(5, 130) for _ in range(num)]

    shared = new(300)
    return [
        [new(30)],
        [new(64), new(65), new(1), new(20)],
        [shared],
        [[*shared[:150], *new(9)], [*shared[:200], *new(100)], new(129)],
        [[*shared[:140], *new(3)], [*shared[:200], *new(70)], [*shared, *new(2)], new(7)],
        [[*shared, *new(5)]],
    ]


def serve(core: EngineCore, turns: Sequence[Sequence[list[int]]]) -> dict[int, list[Any]]:
    """Of each request its tokens, their log probabilities to the last bit, and what was found of its prompt."""
    found: dict[int, list[Any]] = {}
    for turn, asked in enumerate(turns):
        for i, prompt in enumerate(asked):
            core.handle(Submit(rid="", handle=10 * turn + i, prompt_ids=prompt, params=PARAMS))
        while core.has_work:
            for delta in core.step().deltas:
                found.setdefault(delta.handle, []).append((delta.ids, delta.logprobs, delta.cached_tokens))
            assert core.pages.check_counts(core.scheduler.running)
            assert core.pages.check_ownership(core.scheduler.running)
    return found


def test_replayed_prompts_have_the_bits_of_eager_ones(make: Callable[..., EngineCore]) -> None:
    """Whole, cut, together and behind copies that graphs took: what is found in the cache is the same, too."""
    turns = prompts()
    eager, core = serve(make(prefill=False), turns), make()
    assert serve(core, turns) == eager
    graphs: Any = core.executor.stepper._graphs
    assert {key for key, done in graphs.prefill._captured.items() if done.graph.graph.num_replays} == set(SIZES)
    cached = {handle: told[-1][2] for handle, told in eager.items()}
    assert [cached[handle] for handle in (20, 30, 31, 40, 41, 42, 50)] == [0, 128, 192, 128, 192, 256, 256]


def test_a_hit_in_a_graph_has_the_bits_of_a_miss(make: Callable[..., EngineCore]) -> None:
    """The last request, alone in a fresh engine."""
    turns = prompts()
    core = make()
    hit, [cold] = serve(core, turns)[50], serve(make(), [turns[-1]]).values()
    assert (hit[-1][2], cold[-1][2]) == (256, 0)
    assert [told[:2] for told in hit] == [told[:2] for told in cold]


def test_padding_changes_no_state(make: Callable[..., EngineCore]) -> None:
    """States of other rows and copies are as before a step that pads."""
    core = make()
    serve(core, prompts()[:4])
    runner: Any = core.executor.runner  # type: ignore[attr-defined]
    states = runner.state.states
    index = next(spec.index for spec in runner.config.layers if spec.state)

    def held() -> list[torch.Tensor]:
        own = [rows[: runner.state.padding_row] for rows in states.rows(index).values()]
        return [tensor.clone() for tensor in (*own, *states.copies(index).values())]

    before = held()
    assert all(tensor.any() for tensor in before)
    with torch.inference_mode():
        for size in SIZES:
            runner.graphs.prefill.run(NO_TOKENS, no_ints(), size)
    assert all(map(torch.equal, before, held()))


def test_what_copies_where_the_host_says_is_not_recorded() -> None:
    """A layer that calls `recur` and says that it is `in_place`: a graph would take no copies."""
    batch: Any = SimpleNamespace(states=object(), num_decode=0, saves=(), save_table=torch.full((3, 4), -1))
    with pytest.raises(DovetailError, match="layer 7 is `in_place` by its reach"):
        recur(7, torch.ones(2, 3), batch, lambda inputs, state: (inputs, state))
