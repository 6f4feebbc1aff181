"""Eight ranks of one host: tiny models of the families that need so many, packed as those are published.

Two GPUs are the most that these families ever ran on here: that eight ranks say what one says is shown over gloo.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from example_models import run
from rank_engines import PROMPTS, beside, make_core, said

FAMILIES = beside("families", "models/families.py")
sys.modules["families"] = FAMILIES  # as the next ones import it
PACKERS = beside("packers", "models/packers.py")
sys.modules["packers"] = PACKERS
MODELS = beside("quantised_models", "models/quantised_models.py")
METHOD = PACKERS.Method
NUM = 8
WORDS = PACKERS.scheme("int", 4, "group", group_size=32)
OTHERS = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


@dataclass(frozen=True)
class Tiny:
    """A model of a family: what differs from the tiny one of others' tests, and how it is packed.

    Attributes:
        kind: Its `model_type` in transformers.
        sizes: Further keys of its configuration.
        method: Packs its matrices.
        only: Part of the names of those that are packed.
        names: Keys of `config.json` that are written otherwise afterwards.
    """

    kind: str
    sizes: dict[str, Any]
    method: Any
    only: str = ""
    names: dict[str, Any] = field(default_factory=dict)


SIZES: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "num_attention_heads": 8, "head_dim": 32, "moe_intermediate_size": 256,
    "intermediate_size": 512, "num_experts_per_tok": 3,
}  # fmt: skip
LATENT = SIZES | {"v_head_dim": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "num_key_value_heads": 8, "head_dim": 8}
TINY = {
    # Half as many key heads as ranks, as of Qwen3-235B-A22B.
    "qwen3-235b": Tiny(
        "qwen3_moe",
        SIZES | {"num_key_value_heads": 4, "num_experts": 16},
        PACKERS.METHODS["fp8-blocks"],
    ),
    "glm-4.5": Tiny(
        "glm4_moe",
        SIZES | {"num_key_value_heads": 2, "num_experts": 16, "n_routed_experts": 16, "use_qk_norm": True}
        | {"attention_bias": True},
        PACKERS.METHODS["ct-float-rows"],
    ),
    "deepseek-v3": Tiny(
        "deepseek_v3",
        LATENT | {"n_routed_experts": 16, "n_group": 8, "topk_group": 4, "num_hidden_layers": 2},
        PACKERS.METHODS["fp8-blocks"],
    ),
    "kimi-k2": Tiny(
        "deepseek_v3",
        LATENT | {"n_routed_experts": 24, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2},
        METHOD("compressed-tensors", WORDS | {"ignore": OTHERS}, PACKERS.pack_quantized(32)),
        only=".experts.",
        names={"model_type": "kimi_k2"},
    ),
}  # fmt: skip
SAMPLE = [("deepseek-v3", False), ("kimi-k2", True)]
REST = [(name, is_whole) for name in TINY for is_whole in (False, True) if (name, is_whole) not in SAMPLE]


def packed(tiny: Tiny, folder: Path) -> Path:
    """Write a checkpoint; returns the packed one."""
    FAMILIES.make_checkpoint(folder / "plain", tiny.kind, **tiny.sizes)
    found = folder / "packed"
    assert MODELS.pack_model(folder / "plain", found, tiny.method, tiny.only) > 3
    config = json.loads((found / "config.json").read_text())
    (found / "config.json").write_text(json.dumps(config | tiny.names))
    return found


@pytest.fixture
def stays_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fp8 stay packed, as on a GPU: on CPU it is written out while it is read, and no scale is cut."""
    monkeypatch.setattr("dovetail_backends.kernels.cpu.CpuKernels.keeps_packed", lambda _, ask: True)


@pytest.mark.first(1)
@pytest.mark.usefixtures("in_threads", "stays_packed")
@pytest.mark.parametrize(
    ("name", "is_whole"), [*SAMPLE, *(pytest.param(*pair, marks=pytest.mark.full) for pair in REST)]
)
def test_eight_ranks_say_what_one_says(name: str, is_whole: bool, tmp_path: Path) -> None:
    """By width and with whole experts."""
    tiny = TINY[name]
    folder = packed(tiny, tmp_path)
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]

    held: list[int] = []

    def make(**settings: Any) -> Any:
        core = make_core(folder, architecture, tiny.method.plugin, **settings)
        held.append(core.executor.info.weight_bytes)
        return core

    assert said(make, NUM, expert_parallel=is_whole) == said(make, 1)
    plain = sum(file.stat().st_size for file in (tmp_path / "plain").glob("*.safetensors"))
    assert 4 * held[0] < 1.5 * held[1] < plain, "a rank has a share, and packed"


@pytest.mark.full
def test_eight_processes(tmp_path: Path) -> None:
    """As they are started on eight GPUs: each a process, ended together."""
    tiny = TINY["kimi-k2"]
    folder = packed(tiny, tmp_path)
    expected = said(lambda **more: make_core(folder, "DeepseekV3ForCausalLM", tiny.method.plugin, **more), 1)
    core = make_core(folder, "DeepseekV3ForCausalLM", tiny.method.plugin, tensor_parallel_size=NUM)
    try:
        assert run(core, PROMPTS, 12) == expected
        group: Any = core.executor
        pids = [follower.pid for follower in group.followers]
    finally:
        core.close()
    assert len(pids) == NUM - 1
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
