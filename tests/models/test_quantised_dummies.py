"""Quantised models without a checkpoint, and the plan: what is counted is what is held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from packers import METHODS
from quantised_models import loaded, make, plugin_of

from dovetail.base.settings import EngineSettings
from dovetail.contracts.layers import Parallel
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.quantization import built_bytes, choose_quantization, factory_of
from dovetail.runtime.checkpoint.weight_size import weight_size
from dovetail.runtime.hf_config import architecture, quant_method, read_config
from dovetail.runtime.runner import ModelRunner
from dovetail_testing.conformance.model_runtime import TinyEngine

BLOCKS_OF_128 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}}
    },
}


def test_dummies_of_gpt_oss_are_packed_as_published(tmp_path: Path) -> None:
    """Without a checkpoint experts are mxfp4 and the rest is plain; the plan counts what the engine then holds."""
    folder = tmp_path / "model"
    make_checkpoint(folder, "gpt_oss", hidden_size=64, intermediate_size=96)
    config = json.loads((folder / "config.json").read_text())
    plain = memory_of(folder)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    packed = memory_of(folder)
    numel = config["num_hidden_layers"] * config["num_local_experts"] * 3 * 64 * 96
    assert plain - packed == numel * 4 - numel * 17 // 32, "float32 against 4 bits, and 8 for every 32"


@pytest.mark.parametrize(
    ("quantised", "num_bytes"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, 4),  # no kernel reads such blocks: written out
        (METHODS["ct-float-blocks"].config, 4),  # of 32
        (BLOCKS_OF_128, 1 + 4 / 128),
    ],
)
def test_dummies_of_fp8_blocks_have_their_scales(quantised: dict[str, Any], num_bytes: float, tmp_path: Path) -> None:
    """A scale for as many inputs as a checkpoint's; a matrix that blocks do not divide is plain, as it is read."""
    folder = tmp_path / "model"
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 320, "moe_intermediate_size": 128}
    make_checkpoint(folder, "glm4_moe", **sizes)
    plain = memory_of(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": dict(quantised)}))
    attention = 2 * ((128 + 2 * 64) * 128 + 128 * 128)
    behind = 2 * 320 * 128 + (5 + 1) * 3 * 128 * 128  # the first layer's MLP, without the half of 320 inputs; experts
    assert plain - memory_of(folder) == (attention + behind) * (4 - num_bytes)


def test_dummies_follow_what_a_checkpoint_leaves_out(tmp_path: Path) -> None:
    """Kimi-K2's experts alone are packed, as its `ignore` names all others; where a router is left out, all are."""
    folder, sizes = tmp_path / "model", {"moe_intermediate_size": 64, "hidden_size": 64, "intermediate_size": 96}
    make_checkpoint(folder, "deepseek_v3", **sizes)
    plain = memory_of(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    words = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": scheme}}}
    others = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    experts = 2 * 8 * 3 * 64 * 64 * (4 - 1 / 2 - 2 / 32)
    for left_out, is_alone in ((others, True), (["lm_head", r"re:.*mlp\.gate$"], False)):
        file.write_text(json.dumps(config | {"quantization_config": words | {"ignore": left_out}}))
        saved = plain - memory_of(folder)
        assert saved == experts if is_alone else saved > experts


def memory_of(folder: Path) -> int:
    """Return the bytes of weights that an engine of dummies holds, once it has planned with as many."""
    hf = read_config(folder)
    settings = EngineSettings(
        model_path=str(folder), dtype="float32", device="cpu", max_total_tokens=256, load_format="dummy"
    )
    made = make_plan(
        Registry.scan(), model=architecture(hf, folder), attention_backend="auto", device="cpu", quantization="auto",
        quant_method=quant_method(hf), checkpoint="dummy",
    )  # fmt: skip
    plugins = load(made, "engine")
    chosen, model = choose_quantization(plugins, hf), plugins.get("model", architecture(hf, folder))
    runner = ModelRunner(settings, plugins)
    factory = factory_of(chosen and chosen[1], hf, model.weight_map(runner.config), None)
    assert built_bytes(model, runner.config, torch.float32, factory, Parallel()) == runner.weight_bytes
    assert all(bool(param.float().isfinite().all()) for param in runner.model.parameters())
    biases = [param for name, param in runner.model.named_parameters() if name.endswith("bias")]
    assert all(bool((bias < 0).any()) and bool((bias > 0).any()) for bias in biases), "of one sign, they make all alike"
    return int(runner.weight_bytes)


def test_the_plan_counts_what_will_be_kept(tmp_path: Path) -> None:
    """Packed int4 is counted as it is, numbers that are written out as the model's dtype."""
    for way in ("awq", "ct-int4", "gptq-8", "ct-nvfp4", "fp8-blocks"):
        folder = make(tmp_path / way, way)
        model, read = loaded(folder, METHODS[way].plugin)
        config = TinyEngine(plugin_of("model", "Qwen3ForCausalLM"), folder.with_name("plain")).config
        planned = weight_size(read.headers, config, "float32").num_bytes
        plain = weight_size(
            ModelFolder(folder.with_name("plain")).headers, config, "float32", head_row_bytes=0
        ).num_bytes
        assert (planned < 0.6 * plain) == METHODS[way].kit.get("stays_packed", True), way
        del model
