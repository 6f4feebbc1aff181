"""Writes `quantised.safetensors`: a small matrix as the field's own tools store it, and as they read it back.

Run by hand, with compressed-tensors 0.20 and bitsandbytes 0.50 installed: `python make_quantised.py`.
Tensors are `WAY/SUFFIX`, and `WAY/=` is the matrix in float32 that the tool itself makes of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

HERE = Path(__file__).parent
NUM_OUT, NUM_IN = 16, 128
CT: dict[str, tuple[str, dict[str, Any]]] = {
    "ct-int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "ct-int4-asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "ct-int8-packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "ct-int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "ct-int8-asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "ct-float": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "ct-mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
    "ct-nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
    ),
    "ct-mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
}


def compressed(weight: torch.Tensor, name: str, args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Compress with compressed-tensors."""
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    state: dict[str, torch.Tensor] = {"weight": weight}
    size = args.get("group_size") or weight.shape[1]
    groups = weight.view(weight.shape[0], -1, size)
    whole = None
    if args["strategy"] == "tensor_group":
        whole = state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), weights, global_scale=whole)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    maker = BaseCompressor.get_value_from_registry(name)
    made = maker.compress(state, scheme)
    back = maker.decompress(dict(made), scheme)["weight"]
    return {**{f".{key}": value for key, value in made.items() if value is not None}, "=": back.float()}


def main() -> None:
    """Make all."""
    torch.manual_seed(0)
    weight = torch.randn(NUM_OUT, NUM_IN) * torch.linspace(0.02, 2, NUM_OUT)[:, None]
    found: dict[str, torch.Tensor] = {}
    for way, (name, args) in CT.items():
        found |= {f"{way}/{key}": value for key, value in compressed(weight, name, args).items()}
    for way, nested in (("nf4", False), ("nf4-nested", True)):
        packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
        made = {".weight": packed, **{f".weight.{key}": value for key, value in state.as_dict(packed=True).items()}}
        made["="] = bnb.dequantize_4bit(packed, state).float()
        found |= {f"{way}/{key}": value for key, value in made.items()}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, HERE / "quantised.safetensors")


if __name__ == "__main__":
    main()
