"""Checkpoints packed in every way, on ranks: scales, zeros and groups are cut with the matrices they stand for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_engines import beside, make_core, said

FAMILIES = beside("families", "models/families.py")
sys.modules["families"] = FAMILIES  # as the next ones import it
PACKERS = beside("packers", "models/packers.py")
sys.modules["packers"] = PACKERS
MODELS = beside("quantised_models", "models/quantised_models.py")
FULL = bool(os.environ.get("DOVETAIL_FULL"))
METHODS: dict[str, Any] = PACKERS.METHODS
WAYS = [name for name in METHODS if name not in ("mxfp4", "int8")]
"""All but those of gpt-oss alone and of our own files, which have tests beside."""
pytestmark = pytest.mark.usefixtures("in_threads")


def tokens(folder: Path, way: str, num: int, **settings: Any) -> list[list[int]]:
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    plugin = METHODS[way].plugin
    return said(lambda **more: make_core(folder, architecture, plugin, **settings, **more), num)


ALL = [(way, family) for way in WAYS for family in ("qwen3", "qwen3_moe")]
SAMPLE = [pair for number, pair in enumerate(ALL) if number % 5 == 0]
"""Of both families, and of every plugin."""


@pytest.mark.parametrize(("way", "family"), ALL if FULL else SAMPLE)
def test_a_packed_model_says_on_ranks_what_it_says_on_one(way: str, family: str, tmp_path: Path) -> None:
    """Dense and with experts; with four ranks, two of them have the same key heads. `DOVETAIL_FULL=1` takes all."""
    sizes = {"vocab_size": 199, "intermediate_size": 256}
    sizes |= {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    FAMILIES.make_checkpoint(tmp_path / "plain", family, **sizes)
    assert MODELS.pack_model(tmp_path / "plain", tmp_path / "packed", METHODS[way]) > 3
    expected = tokens(tmp_path / "packed", way, 1)
    for num in (2, 4) if FULL else (2,):
        assert tokens(tmp_path / "packed", way, num) == expected, num


def test_the_sample_has_every_plugin() -> None:
    """A way of each is always taken."""
    assert {METHODS[way].plugin for way, _ in SAMPLE} == {METHODS[way].plugin for way in WAYS}
