"""Requests with images under graphs, on CPU (see `fake_graphs`): prompts run eagerly, decode steps are replays."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_graphs import make_captured, use_triton

from dovetail.runtime.graphs.decode import DecodeGraphs

sys.path.append(str(Path(__file__).parents[1] / "models"))  # the models that see

from seeing import Prompts, make_vl, picture, reference


@pytest.mark.parametrize("overlaps", [False, True])
def test_replies_are_transformers(overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with images and rows without decode in one graph, each by its own numbers, also where rows change owners."""
    use_triton(monkeypatch)
    model = make_vl(tmp_path / "model")
    prompts = Prompts(tmp_path / "model", tmp_path / "files")
    each: list[Any] = [
        [[3, 9, 14], picture(91, 57), [7, 8]],
        [[5, 6, 7, 8]],
        [picture(57, 200), [9]],
        [[11, 12, 13]],
        [[4], picture(28, 28), [9, 9], picture(143, 143, seed=1)],
    ]
    submits = [prompts.submit(parts, num=4 + 3 * i) for i, parts in enumerate(each)]
    core = make_captured(tmp_path / "model", max_running_requests=2, page_size=4, overlap_on_cpu=overlaps)
    replays: list[Any] = []
    run = DecodeGraphs.run
    monkeypatch.setattr(DecodeGraphs, "run", lambda self, *args: replays.append(args) or run(self, *args))
    found: dict[int, list[int]] = {}
    for handle, submit in enumerate(submits):
        core.handle(msgspec.structs.replace(submit, handle=handle))
    while core.has_work:
        for delta in core.step().deltas:
            found.setdefault(delta.handle, []).extend(delta.ids)
    wanted = [
        reference(model, parts, submit, 4 + 3 * i) for i, (parts, submit) in enumerate(zip(each, submits, strict=True))
    ]
    assert [found[handle] for handle in range(5)] == wanted
    assert len(replays) > 20
