"""Every family with a plugin of its own, in every way that matrices are stored: logits are those of what was packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import OWN, config_of, make_checkpoint
from packers import METHODS
from quantised_models import loaded, pack_model, plugin_of

from dovetail.runtime.hf_config import architecture, read_config
from dovetail_testing.conformance.model_runtime import TinyEngine

FAMILIES = ["llama", "qwen2", "qwen3", *OWN]
WAYS = [name for name in METHODS if not name.endswith("divide") and name not in ("mxfp4", "int8")]
"""All but those that only differ in sizes, and that of gpt-oss, which has no such files of other models."""
PROMPTS = [[5, 7, 11, 13, 17, 19, 23, 29], [3, 4]]
ALL = [(family, way) for family in FAMILIES for way in WAYS]
SAMPLE = [(family, WAYS[(3 * index) % len(WAYS)]) for index, family in enumerate(FAMILIES)]
SAMPLE += [("qwen3_moe", way) for way in WAYS if way not in {taken for _, taken in SAMPLE}]


@pytest.mark.first(20)
@pytest.mark.parametrize(
    ("family", "way"), [pytest.param(*pair, marks=() if pair in SAMPLE else pytest.mark.full) for pair in ALL]
)
def test_a_family_packed_is_the_family_written_out(family: str, way: str, tmp_path: Path) -> None:
    """Fused projections, experts, latent attention, tied heads: what is packed is found and multiplied rightly."""
    plain, method = tmp_path / "plain", METHODS[way]
    wide = {"moe_intermediate_size": 64} if hasattr(config_of(family), "moe_intermediate_size") else {}
    make_checkpoint(plain, family, **wide)
    num = pack_model(plain, tmp_path / "packed", method)
    assert num > 3, "nothing was packed"
    engine = TinyEngine(plugin_of("model", architecture(read_config(plain), plain)), plain)
    want = engine.prefill_logits(PROMPTS)
    engine.model, _ = loaded(tmp_path / "packed", method.plugin)
    for mine, right in zip(engine.prefill_logits(PROMPTS), want, strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-4, atol=2e-4 * float(right.abs().max()))
