"""Decode steps that are replayed read and write the states of their rows; padding rows touch nobody's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_graphs import PlainAttention, add_graphs

from dovetail.engine.step_builder import GraphChooser, StepBuilder

spec = importlib.util.spec_from_file_location(
    "captured_example_models", Path(__file__).parents[1] / "engine/example_models.py"
)
assert spec is not None
assert spec.loader is not None
_models = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_models)
models: Any = _models


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_replays_fold_as_eager_steps_do(overlap: bool, tmp_path: Path) -> None:
    """Batches of three rows in a graph of four, over copies and chunks that run eagerly: the reference's tokens."""
    example = models.Example("recurrent", "RecurrentForCausalLM")
    folder = example.reference().write_checkpoint(tmp_path / "model")
    core = example.make_engine(folder, overlap_on_cpu=overlap, disable_overlap_schedule=not overlap)
    executor = core.executor
    runner = executor.runner
    runner.attention = PlainAttention(runner.config, runner.pool.pools[0], runner.device)
    executor.stepper._attention = runner.attention
    graphs = add_graphs(executor, prefill=False)
    core.graphs = GraphChooser(executor.info, executor.prepare)
    core._builder = StepBuilder(core.rows, core.graphs)
    prompts = [models.prompt(n, 1) for n in (33, 40, 70)]
    for _ in range(2):
        found = models.run(core, prompts, 10)
        assert found == [example.right(folder, *pair) for pair in zip(prompts, found, strict=True)]
    assert sum(graph.num_replays for graph in graphs.graphs) > 10
