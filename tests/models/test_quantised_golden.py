"""What the field's own tools wrote, and read back, is what our readers make of it; see `golden/make_*.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import plugin_of
from safetensors.torch import load_file, save_file

from dovetail.contracts.model import WeightRule
from dovetail.contracts.quantization import Stored
from dovetail.runtime.checkpoint.files import open_checkpoint
from dovetail.runtime.checkpoint.quantization import Widths, convert, stored_tensors
from dovetail.runtime.checkpoint.weights import load_weights
from dovetail.sdk.layers.packed import PackedLinear
from dovetail.sdk.layers.plain import PLAIN
from dovetail_testing.conformance.quantization import CPU, BuildContext, ModuleHolder
from dovetail_testing.targets import target_for

HERE = Path(__file__).parent / "golden"
GOLDEN = load_file(HERE / "quantised.safetensors") | load_file(HERE / "packed.safetensors")
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def scheme(**weights: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors."""
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}


CONFIGS: dict[str, dict[str, Any]] = {
    "ct-int4": scheme(num_bits=4, strategy="group", group_size=32),
    "ct-int4-asymmetric": scheme(num_bits=4, strategy="group", group_size=32, symmetric=False),
    "ct-int8-packed": scheme(num_bits=8, strategy="channel"),
    "ct-int8": scheme(num_bits=8, strategy="channel"),
    "ct-int8-asymmetric": scheme(num_bits=8, strategy="channel", symmetric=False),
    "ct-float": scheme(num_bits=8, type="float", strategy="channel"),
    "ct-mxfp8": scheme(num_bits=8, type="float", strategy="group", group_size=32),
    "ct-nvfp4": scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "ct-mxfp4": scheme(num_bits=4, type="float", strategy="group", group_size=32),
    "nf4": BNB,
    "nf4-nested": BNB,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": False},
    "gptq-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "modelopt-fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "mxfp4"},
}


PACKED = ("ct-int4", "ct-int4-asymmetric", "ct-int8-packed", "ct-int8", "awq", "gptq")
"""Ways that stay packed on CPU."""


@pytest.mark.parametrize("way", CONFIGS)
def test_what_a_tool_wrote_is_read_as_it_reads_it(way: str, tmp_path: Path) -> None:
    """The weight is the tool's own, to its rounding."""
    tensors = {name.partition("/")[2]: tensor for name, tensor in GOLDEN.items() if name.startswith(f"{way}/")}
    want = tensors.pop("=")
    (tmp_path / "x").mkdir()
    save_file({f"m{suffix}": tensor for suffix, tensor in tensors.items()}, tmp_path / "x/model.safetensors")
    plugin, rules = plugin_of("quantization", str(CONFIGS[way]["quant_method"])), [WeightRule("m", "m")]
    read = convert(
        open_checkpoint(tmp_path / "x"),
        plugin,
        CONFIGS[way],
        rules,
        Widths({"m": want.shape[1]}),
        target_for("float32"),
    )
    factory = plugin(CONFIGS[way], Stored(stored_tensors(rules, read.headers))).factory(PLAIN)
    with torch.inference_mode():
        ctx = BuildContext(device=CPU, dtype=torch.float32, factory=factory)
        holder = ModuleHolder(ctx, lambda at: at.linear("m", want.shape[1], want.shape[0]))
        load_weights(holder, rules, read)
        got = holder.m(torch.eye(want.shape[1])).T
    assert isinstance(holder.m, PackedLinear) == (way in PACKED)
    # mx scales come back from the tool in bfloat16.
    torch.testing.assert_close(got, want, rtol=1e-2 if "mx" in way or "nvfp4" in way else 1e-5, atol=1e-6)
