"""Engines of the example with two widths, from its file: nothing has to be installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dovetail.client import launch
from dovetail.engine.core import EngineCore
from dovetail.messages import SamplingParams, Submit
from dovetail.plugins import Registry, load, make_plan
from dovetail.plugins.files import add_file
from dovetail.settings import EngineSettings

EXAMPLE = Path(__file__).parents[2] / "docs/examples/dovetail-two-widths"
WINDOW = 24


def load_reference() -> Any:
    """Import the example's model in plain torch."""
    name = "two_widths_reference"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def make_engine(folder: Path, files: Sequence[Path] = (), **changes: Any) -> EngineCore:
    """Make an engine without a loop around it, with the plugins of further files."""
    settings = EngineSettings(
        model_path=str(folder),
        **{"dtype": "float32", "device": "cpu", "page_size": 4, "max_total_tokens": 2048, "max_running_requests": 4}
        | {"chunked_prefill_size": 64, "disable_compile_ahead": True}
        | changes,
    )
    registry = Registry.scan()
    for file in (EXAMPLE / "dovetail_two_widths.py", *files):
        add_file(registry, file)
    plan = make_plan(
        registry,
        model="TwoWidthsForCausalLM",
        attention_backend=settings.attention_backend,
        schedule_policy=settings.schedule_policy,
        device=settings.device,
    )
    return launch.make_engine(settings, load(plan, "engine"))


def run(core: EngineCore, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """Generate greedily, all prompts at once; the book is checked after every step."""
    first = core._arrivals
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
        core.handle(Submit(rid="", handle=first + number + 1, prompt_ids=list(prompt), params=params))
    found: dict[int, list[int]] = {first + number + 1: [] for number in range(len(prompts))}
    for _ in range(20 * num_new * len(prompts) + 2000):
        if not core.has_work:
            break
        for delta in core.step().deltas:
            found[delta.handle] += delta.ids
            assert delta.finish is None or delta.finish.reason == "length", delta.finish
        core.pages.check(core.scheduler.running)
    assert not core.has_work
    return list(found.values())


def right(folder: Path, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The reference's choice behind each prefix of the tokens found; equal exactly where all of them are."""
    logits = load_reference().logits(folder, [*prompt, *tokens[:-1]])
    return [int(row.argmax()) for row in torch.as_tensor(logits)[len(prompt) - 1 :]]
