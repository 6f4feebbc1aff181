"""Engines of the examples' models, from their files: nothing has to be installed."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail.base.settings import EngineSettings
from dovetail.client import launch
from dovetail.engine.core import EngineCore
from dovetail.messages import SamplerParams, Submit
from dovetail.plugins import Registry, load, make_plan
from dovetail.plugins.files import add_file

EXAMPLES = Path(__file__).parents[2] / "docs/examples"


@dataclass(frozen=True)
class Example:
    """A model of `docs/examples`, by its package's name (`two-widths`) and its architecture."""

    name: str
    architecture: str

    @property
    def stem(self) -> str:
        """As in its files' names."""
        return self.name.replace("-", "_")

    def reference(self) -> Any:
        """Import its model in plain torch."""
        name = f"{self.stem}_reference"
        if name not in sys.modules:
            path = EXAMPLES / f"dovetail-{self.name}" / f"{name}.py"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    def make_engine(self, folder: Path, files: Sequence[Path] = (), **changes: Any) -> EngineCore:
        """Make an engine without a loop around it, with the plugins of further files."""
        settings = EngineSettings(
            model_path=str(folder),
            **{"dtype": "float32", "device": "cpu", "page_size": 4, "max_total_tokens": 2048, "max_running_requests": 4}
            | {"chunked_prefill_size": 64, "disable_compile_ahead": True}
            | changes,
        )
        registry = Registry.scan()
        for file in (EXAMPLES / f"dovetail-{self.name}" / f"dovetail_{self.stem}.py", *files):
            add_file(registry, file)
        plan = make_plan(
            registry,
            model=self.architecture,
            attention_backend=settings.attention_backend,
            schedule_policy=settings.schedule_policy,
            speculator=settings.speculator,
            device=settings.device,
        )
        return launch.make_engine(settings, load(plan, "engine"))

    def right(self, folder: Path, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The reference's choice behind each prefix of the tokens found; equal exactly where all of them are."""
        logits = self.reference().logits(folder, [*prompt, *tokens[:-1]])
        return [int(row.argmax()) for row in torch.as_tensor(logits)[len(prompt) - 1 :]]


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(190) for _ in range(length)]


def run(core: EngineCore, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """Generate greedily, all prompts at once; the book is checked after every step."""
    first = core._arrivals
    for number, prompt in enumerate(prompts):
        params = SamplerParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
        core.handle(Submit(rid="", handle=first + number + 1, prompt_ids=list(prompt), params=params))
    found: dict[int, list[int]] = {first + number + 1: [] for number in range(len(prompts))}
    for _ in range(20 * num_new * len(prompts) + 2000):
        if not core.has_work:
            break
        for delta in core.step().deltas:
            found[delta.handle] += delta.ids
            assert delta.finish is None or delta.finish.reason == "length", delta.finish
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    assert not core.has_work
    return list(found.values())
