"""Checkpoints packed in every way, on ranks: scales, zeros and groups are cut with the matrices they stand for."""

from __future__ import annotations

import json
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
METHODS: dict[str, Any] = PACKERS.METHODS
WAYS = [name for name in METHODS if name not in ("mxfp4", "int8")]
"""All but those of gpt-oss alone and of our own files, which have tests beside."""
pytestmark = pytest.mark.usefixtures("in_threads")


def tokens(folder: Path, way: str, num: int, **settings: Any) -> list[list[int]]:
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    plugin = METHODS[way].plugin
    return said(lambda **more: make_core(folder, architecture, plugin, **settings, **more), num)


FAMILY = ("qwen3", "qwen3_moe")
SAMPLE = {METHODS[way].plugin: (way, FAMILY[number % 2]) for number, way in enumerate(WAYS)}.values()
"""Of both families, and of every plugin."""
FOLDING = (
    *("qwen3_next", "qwen3_5_text", "granitemoehybrid", "bamba", "falcon_h1", "lfm2", "lfm2_moe", "olmo_hybrid"),
    *("mamba2", "falcon_mamba", "jamba", "kimi_linear", "bailing_hybrid"),
)
HYBRID = [(way, FOLDING[number % len(FOLDING)]) for number, way in enumerate(WAYS)]
REST = [(way, family) for way in WAYS for family in FAMILY if (way, family) not in SAMPLE] + HYBRID


@pytest.mark.first(3)
@pytest.mark.parametrize(("way", "family"), [*SAMPLE, *(pytest.param(*pair, marks=pytest.mark.full) for pair in REST)])
def test_a_packed_model_says_on_ranks_what_it_says_on_one(way: str, family: str, tmp_path: Path) -> None:
    """Dense, with experts and hybrid; with four ranks, two of them have the same key heads."""
    sizes = {"vocab_size": 199, "intermediate_size": 256}
    sizes |= {"moe_intermediate_size": 128} if family in ("qwen3_moe", "qwen3_next", "lfm2_moe") else {}
    sizes |= {"shared_intermediate_size": 256} if family == "granitemoehybrid" else {}
    FAMILIES.make_checkpoint(tmp_path / "plain", family, **sizes)
    assert MODELS.pack_model(tmp_path / "plain", tmp_path / "packed", METHODS[way]) > 3
    expected = tokens(tmp_path / "packed", way, 1)
    for num in (2,) if (way, family) in SAMPLE else (2, 4):
        assert tokens(tmp_path / "packed", way, num) == expected, num
