"""Writes `packed.safetensors`: a small matrix as the packers of AWQ, GPTQ, modelopt and MXFP4 store it.

Run by hand in an environment that is thrown away, `python make_packed.py PLACE`, where PLACE has the unpacked packages

    autoawq-0.2.9 (its source distribution), autogptq (the wheel of auto-gptq 0.7.1 for Python 3.11)

and the environment nvidia-modelopt 0.47, transformers 5 and numpy. Of the first two only the files that pack are
imported: what these packages import at their top needs CUDA, or transformers 4. Tensors are `WAY/SUFFIX`, and `WAY/=`
is the matrix in float32 `[N, K]` that the tool itself makes of them; transformers reads the MXFP4 that modelopt packed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HERE, PLACE = Path(__file__).parent, Path(sys.argv[1])
NUM_OUT, NUM_IN, GROUP = 32, 128, 32
Made = dict[str, Tensor]


def bare(name: str, root: Path) -> None:
    """Make a package importable without running its `__init__`."""
    module = ModuleType(name)
    module.__path__ = [str(root)]
    sys.modules[name] = module


def affine(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales in float16 and zero points `[N, K / GROUP]`; one step is left free, since packers do not clamp."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 3)).half().float()
    return scale, (-low / scale).round().clamp(1, 2**bits - 2)


def linear(weight: Tensor) -> nn.Linear:
    """Return a layer with a weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return layer


def awq(weight: Tensor) -> Made:
    """Pack with AutoAWQ's GEMM layer."""
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        bare(name, PLACE / "autoawq-0.2.9" / name.replace(".", "/"))
    layers = import_module("awq.modules.linear.gemm")
    unpack = import_module("awq.utils.packing_utils").dequantize_gemm
    scale, zero = affine(weight, 4)
    made = layers.WQLinear_GEMM.from_linear(
        linear(weight), 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous()
    )
    tensors = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}
    back = unpack(made.qweight, made.qzeros, made.scales.float(), 4, GROUP)
    return {**{f".{name}": tensor for name, tensor in tensors.items()}, "=": back.T.float()}


def gptq(weight: Tensor, bits: int, *, in_order: bool) -> Made:
    """Pack with AutoGPTQ; without order, each input has a group of its choice."""
    for name in ("auto_gptq", "auto_gptq.nn_modules"):
        bare(name, PLACE / "autogptq" / name.replace(".", "/"))
    # Both layers pack alike; the older one takes groups as they lie.
    layer = import_module(f"auto_gptq.nn_modules.qlinear.{'qlinear_cuda_old' if in_order else 'qlinear_cuda'}")
    made = layer.QuantLinear(bits, GROUP, NUM_IN, NUM_OUT, False)
    order = torch.arange(NUM_IN) // GROUP if in_order else torch.randperm(NUM_IN) // GROUP
    sorted_weight = weight[:, order.argsort(stable=True)]
    scale, zero = affine(sorted_weight, bits)
    made.pack(linear(weight), scale.clone(), zero.clone(), order.to(torch.int32))
    tensors = {f".{name}": getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    tensors[".scales"] = tensors[".scales"].half()
    made.scales = made.scales.float()
    made.bias = None
    back = made(torch.eye(NUM_IN))
    return {**tensors, "=": back.detach().T.float()}


def modelopt(weight: Tensor) -> dict[str, Made]:
    """Pack with modelopt: fp8 with one scale, nvfp4; and mxfp4, which transformers reads back."""
    tensors: dict[str, Any] = {
        name: import_module(f"modelopt.torch.quantization.qtensor.{name}_tensor") for name in ("fp8", "nvfp4", "mxfp4")
    }
    packed, scale = tensors["fp8"].FP8QTensor.quantize(weight)
    back = packed.dequantize(torch.float32, scale=scale)
    fp8 = {".weight": packed._quantized_data, ".weight_scale": scale.reshape(()), "=": back}
    packed, small, whole = tensors["nvfp4"].NVFP4QTensor.quantize(weight, 16)
    back = packed.dequantize(torch.float32, scale=small, double_scale=whole, block_sizes={-1: 16})
    nvfp4 = {".weight": packed._quantized_data, ".weight_scale": small, ".weight_scale_2": whole, "=": back}
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, powers = tensors["mxfp4"].MXFP4QTensor.quantize(weight, 32)
    blocks = packed._quantized_data.view(1, NUM_OUT, NUM_IN // 32, 16)
    scales = powers.view(1, NUM_OUT, NUM_IN // 32)
    back = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    mxfp4 = {"_blocks": blocks[0], "_scales": scales[0], "=": back}
    return {"modelopt-fp8": fp8, "modelopt-nvfp4": nvfp4, "mxfp4": mxfp4}


def main() -> None:
    """Make all."""
    torch.manual_seed(0)
    weight = torch.randn(NUM_OUT, NUM_IN) * torch.linspace(0.02, 2, NUM_OUT)[:, None]
    ways = {"awq": awq(weight), "gptq-8": gptq(weight, 8, in_order=True), "gptq": gptq(weight, 4, in_order=True)}
    ways |= {"gptq-order": gptq(weight, 4, in_order=False), **modelopt(weight.clone())}
    found = {f"{way}/{name}": tensor for way, tensors in ways.items() for name, tensor in tensors.items()}
    for way, tensors in ways.items():
        print(way, f"{float((tensors['='] - weight).norm() / weight.norm()):.3f} from the weight")
    save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, HERE / "packed.safetensors")


if __name__ == "__main__":
    main()
