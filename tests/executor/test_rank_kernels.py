"""Kernel sets that `auto` measures, on several ranks: the first one's figures hold for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_engines import make_core, said

from dovetail.contracts.kernels import Ask, Claim, KernelSet, meaning
from dovetail.runtime.kernels.binding import LoadedSet
from dovetail.runtime.kernels.contest import TRIAL_ROWS, Trials
from dovetail.runtime.start import check
from dovetail_testing.models import make_model


class Norms(KernelSet):
    """Serves norms by their meaning, and counts."""

    devices = frozenset({"cpu"})
    num_made = 0

    def serves(self, ask: Ask) -> Claim | str:
        return Claim(ask.rows) if ask.op == "rms_norm" else f"no {ask.op}"

    def make(self, ask: Ask) -> Any:
        type(self).num_made += 1
        return meaning(ask)


@pytest.mark.usefixtures("in_threads")
def test_the_first_rank_measures_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every rank takes what it has measured, though each has its own clock: one of theirs would say otherwise."""
    folder = make_model(tmp_path / "model", "LlamaForCausalLM")
    timed: list[float] = []

    def seconds(run: Callable[[], object], is_captured: bool) -> float:
        timed.append(2.0 - len(timed) % 2)
        return timed[-1]

    sets = {name: type(name, (Norms,), {"num_made": 0}) for name in ("slow", "fast")}
    loaded = [LoadedSet(name, f"kernels {name!r} of x 1", kind(), False) for name, kind in sets.items()]
    plain = said(lambda **more: make_core(folder, "LlamaForCausalLM", **more), 1)
    monkeypatch.setattr(check, "load_sets", lambda plugins: loaded)
    monkeypatch.setattr(Trials, "on", lambda device: Trials(torch.device("cpu"), "a processor", seconds))
    assert said(lambda **more: make_core(folder, "LlamaForCausalLM", **more), 2) == plain
    num, rest = divmod(len(timed), 2 * len(TRIAL_ROWS))
    assert (num > 0, rest) == (True, 0)
    assert {name: kind.num_made for name, kind in sets.items()} == {"slow": num, "fast": 2 * num}
