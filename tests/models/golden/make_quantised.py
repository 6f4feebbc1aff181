"""Writes `quantised.safetensors`: a small matrix as the field's own tools store it, and as they read it back.

Run by hand, with compressed-tensors 0.20, bitsandbytes 0.50 and gguf 0.19 installed: `python make_quantised.py`.
Tensors are `WAY/SUFFIX`, and `WAY/=` is the matrix in float32 that the tool itself makes of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import gguf
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

HERE = Path(__file__).parent
NUM_OUT, NUM_IN = 8, 256
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
GGUF = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")


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
    for way in GGUF:
        kind = gguf.GGMLQuantizationType[way]
        try:
            raw = gguf.quantize(weight.numpy(), kind)
        except NotImplementedError:  # blocks of no tool's making, but readable: any bytes with small scales are
            block, size = gguf.GGML_QUANT_SIZES[kind]
            raw = np.random.default_rng(0).integers(0, 256, (NUM_OUT, NUM_IN // block * size), dtype=np.uint8)
            at = {"Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (size - 2, size)}[way]
            tiny = np.linspace(0.001, 0.01, (at[1] - at[0]) // 2).astype(np.float16).view(np.uint8)
            raw.reshape(NUM_OUT, -1, size)[..., at[0] : at[1]] = tiny
        found[f"gguf-{way}/"] = torch.from_numpy(raw.view(np.uint8).reshape(NUM_OUT, -1).copy())
        found[f"gguf-{way}/="] = torch.from_numpy(
            gguf.dequantize(raw, kind).reshape(NUM_OUT, NUM_IN).astype(np.float32)
        )
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, HERE / "quantised.safetensors")


if __name__ == "__main__":
    main()
