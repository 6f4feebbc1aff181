"""Packs matrices as the tools of the field do, in plain loops, and says beside them what they stand for.

Written from the tools' own layouts and not with the code that reads them. N outputs, K inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by suffix, and the matrix in float32."""
MADE: dict[int, Tensor] = {}
"""What the tensors of a matrix stand for, by a hash of their bytes."""


@dataclass(frozen=True)
class Method:
    """A way to store a matrix.

    Attributes:
        plugin: Which reads it.
        config: `quantization_config`.
        make: Packs a matrix.
        kit: Further attributes of the conformance class.
    """

    plugin: str
    config: Mapping[str, Any]
    make: Callable[[Tensor], Packed]
    kit: Mapping[str, Any] = field(default_factory=dict)

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Pack, and remember what it stands for."""
        tensors, plain = self.make(weight.float())
        MADE[_key(tensors)] = plain
        return tensors

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return what was packed."""
        return MADE[_key(tensors)]


def _key(tensors: Mapping[str, Tensor]) -> int:
    parts = (tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in sorted(tensors.items()))
    return hash(b"".join(bytes(part.tolist()) for part in parts))


def blocks(rows: int, columns: int, scale_dtype: torch.dtype = torch.float32, name: str = ".weight_scale_inv") -> Any:
    """Pack e4m3 with a scale for each block of rows and columns."""

    def make(weight: Tensor) -> Packed:
        num_out, num_in = weight.shape
        scales = torch.empty(-(-num_out // rows), -(-num_in // columns))
        packed, plain = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale = (weight[at].abs().max() / 448).clamp_min(2.0**-80)
                scale = scale if scale_dtype == torch.float32 else 2.0 ** scale.log2().ceil()
                packed[at] = (weight[at] / scale).to(torch.float8_e4m3fn)
                plain[at], scales[i, j] = packed[at].float() * scale, scale
        if scale_dtype == torch.uint8:
            return {".weight": packed, name: (scales.log2() + 127).to(torch.uint8)}, plain
        return {".weight": packed, name: scales.to(scale_dtype)}, plain

    return make


def one_scale(shape: tuple[int, ...], name: str = ".weight_scale") -> Any:
    """Pack e4m3 with one scale for the matrix, and one of static activations."""

    def make(weight: Tensor) -> Packed:
        scale = weight.abs().max() / 448
        packed = (weight / scale).to(torch.float8_e4m3fn)
        others = {".input_scale": torch.tensor(0.5)}
        return {".weight": packed, name: scale.reshape(shape), **others}, packed.float() * scale

    return make


def rows_of_float8(weight: Tensor) -> Packed:
    """Pack e4m3 with a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    packed = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": packed, ".weight_scale": scale}, packed.float() * scale


def rounded(weight: Tensor, group: int, bits: int, *, symmetric: bool, groups: Tensor | None = None) -> Any:
    """Return integers from 0 on `[N, K]`, float16 scales and zeros `[N, G]`, and the matrix; the slow way."""
    num_out, num_in = weight.shape
    top = 2**bits - 1
    index = torch.arange(num_in) // group if groups is None else groups
    num = int(index.max()) + 1
    scale, zero = torch.empty(num_out, num, dtype=torch.float16), torch.empty(num_out, num, dtype=torch.int64)
    for g in range(num):
        part = weight[:, index == g]
        if symmetric:
            scale[:, g], zero[:, g] = (part.abs().amax(1) / (top // 2)).clamp_min(1e-4).half(), (top + 1) // 2
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scale[:, g] = ((high - low) / top).clamp_min(1e-4).half()
            zero[:, g] = (-low / scale[:, g].float()).round().clamp(1, top).long()
    values = ((weight / scale.float()[:, index]).round() + zero[:, index]).clamp(0, top).long()
    return values, scale, zero, (values - zero[:, index]).float() * scale.float()[:, index]


def words(values: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack integers into int32 along an axis; place i of a word holds the one of index `order[i]`."""
    num = 32 // bits
    places = order or tuple(range(num))
    short = -values.shape[dim] % num
    moved = torch.nn.functional.pad(values.movedim(dim, -1), (0, short))
    packed = torch.zeros(*moved.shape[:-1], moved.shape[-1] // num, dtype=torch.int64)
    for place, index in enumerate(places):
        packed |= moved[..., index::num] << (bits * place)
    signed = torch.where(packed >= 2**31, packed - 2**32, packed)
    return signed.to(torch.int32).movedim(-1, dim).contiguous()


def awq(group: int) -> Any:
    """Pack as AutoAWQ does."""

    def make(weight: Tensor) -> Packed:
        values, scale, zero, plain = rounded(weight, min(group, weight.shape[1]), 4, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        packed = {".qweight": words(values.T, 4, 1, order), ".qzeros": words(zero.T, 4, 1, order)}
        return {**packed, ".scales": scale.T.contiguous()}, plain

    return make


def gptq(group: int, bits: int = 4, *, symmetric: bool = True, version: int = 1, act_order: bool = False) -> Any:
    """Pack as AutoGPTQ does, or GPTQModel."""

    def make(weight: Tensor) -> Packed:
        num_in = weight.shape[1]
        size = num_in if group == -1 else group
        groups = torch.arange(num_in) // size
        if act_order:
            groups = groups[torch.randperm(num_in, generator=torch.Generator().manual_seed(5))]
        values, scale, zero, plain = rounded(weight, size, bits, symmetric=symmetric, groups=groups)
        packed = {".qweight": words(values.T, bits, 0), ".qzeros": words(zero.T - int(version == 1), bits, 1)}
        return {**packed, ".scales": scale.T.contiguous(), ".g_idx": groups.to(torch.int32)}, plain

    return make


def pack_quantized(group: int | None, bits: int = 4, *, symmetric: bool = True, act_order: bool = False) -> Any:
    """Pack as compressed-tensors does."""

    def make(weight: Tensor) -> Packed:
        num_in = weight.shape[1]
        size = group or num_in
        groups = torch.arange(num_in) // size
        if act_order:
            groups = groups[torch.randperm(num_in, generator=torch.Generator().manual_seed(6))]
        values, scale, zero, plain = rounded(weight, size, bits, symmetric=symmetric, groups=groups)
        made = {".weight_packed": words(values, bits, 1), ".weight_scale": scale}
        made |= {".weight_shape": torch.tensor(weight.shape)}
        made |= {} if symmetric else {".weight_zero_point": words(zero, bits, 0)}
        made |= {".weight_g_idx": groups.to(torch.int32)} if act_order else {}
        return made, plain

    return make


def packed_tensor(weight: Tensor) -> Packed:
    """Pack 8 bits in words with one scale for the matrix, as compressed-tensors does."""
    values, scale, _, plain = rounded(weight.reshape(1, -1), weight.numel(), 8, symmetric=True)
    made = {".weight_packed": words(values.view(weight.shape), 8, 1), ".weight_scale": scale[0]}
    return {**made, ".weight_shape": torch.tensor(weight.shape)}, plain.view(weight.shape)


def blocks_with_axes(weight: Tensor) -> Packed:
    """Pack blocks of 128 x 128 as Model Optimizer does, whose scales keep the axes of the blocks."""
    tensors, plain = blocks(128, 128, name=".weight_scale")(weight)
    return {**tensors, ".weight_scale": tensors[".weight_scale"][:, None, :, None]}, plain


def stored_as(dtype: torch.dtype, make: Callable[[Tensor], Packed]) -> Any:
    """Pack with bytes of the weight as numbers of another type, as `bnb_4bit_quant_storage` has it."""

    def again(weight: Tensor) -> Packed:
        tensors, plain = make(weight)
        return {**tensors, ".weight": tensors[".weight"].flatten().view(dtype)[:, None]}, plain

    return again


def int_quantized(group: int | None, *, symmetric: bool = True) -> Any:
    """Pack int8 as compressed-tensors does."""

    def make(weight: Tensor) -> Packed:
        values, scale, zero, plain = rounded(weight, group or weight.shape[1], 8, symmetric=symmetric)
        made = {".weight": (values - 128).to(torch.int8), ".weight_scale": scale}
        return made | ({} if symmetric else {".weight_zero_point": (zero - 128).to(torch.int8)}), plain

    return make


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-value for value in E2M1]


def four_bits(weight: Tensor, scale: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return bytes of two e2m1 numbers, the lower nibble first, and the matrix."""
    wide = scale.repeat_interleave(group, 1)
    nibbles = ((weight / wide)[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    return (nibbles[:, ::2] | (nibbles[:, 1::2] << 4)).to(torch.uint8), torch.tensor(E2M1)[nibbles] * wide


def nvfp4(*, is_divisor: bool) -> Any:
    """Pack nvfp4 as compressed-tensors (a divisor) or Model Optimizer (a factor) does."""

    def make(weight: Tensor) -> Packed:
        whole = (weight.abs().max() / (6 * 448)).clamp_min(1e-12)
        groups = weight.view(weight.shape[0], -1, 16).abs().amax(-1) / 6 / whole
        scale = groups.to(torch.float8_e4m3fn)
        packed, plain = four_bits(weight, scale.float().clamp_min(2.0**-9) * whole, 16)
        plain = plain.where(scale.float().repeat_interleave(16, 1) > 0, 0)
        if is_divisor:
            whole = 1 / whole
            plain = plain / (scale.float().clamp_min(2.0**-9).repeat_interleave(16, 1))
            plain = torch.tensor(E2M1)[nibbles_of(packed)] * (scale.float() / whole).repeat_interleave(16, 1)
            made = {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": whole.reshape(1)}
            return made | {".input_global_scale": torch.ones(1)}, plain
        made = {".weight": packed, ".weight_scale": scale, ".weight_scale_2": whole, ".input_scale": torch.tensor(1.0)}
        return made, plain

    return make


def nibbles_of(packed: Tensor) -> Tensor:
    """Return the nibbles of bytes, the lower one first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()


def mxfp4(names: tuple[str, str], *, in_blocks: bool) -> Any:
    """Pack mxfp4 as gpt-oss is published (in blocks of 16 bytes), or as compressed-tensors does."""

    def make(weight: Tensor) -> Packed:
        powers = (weight.view(weight.shape[0], -1, 32).abs().amax(-1) / 6).clamp_min(2.0**-60).log2().ceil()
        packed, plain = four_bits(weight, powers.exp2(), 32)
        packed = packed.view(weight.shape[0], -1, 16) if in_blocks else packed
        return {names[0]: packed, names[1]: (powers + 127).to(torch.uint8)}, plain

    return make


NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0]


def nf4(*, nested: bool) -> Any:
    """Pack nf4 as bitsandbytes does, its scales plain or quantised once more."""

    def make(weight: Tensor) -> Packed:
        flat = weight.flatten()
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 64)).view(-1, 64)
        absmax, code = padded.abs().amax(1), torch.tensor(NF4)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        made: dict[str, Tensor] = {".weight.quant_map": code}
        if nested:
            offset, levels = float(absmax.mean()), torch.linspace(-1, 1, 256)
            short = -absmax.numel() % 256
            inner = torch.nn.functional.pad(absmax - offset, (0, short)).view(-1, 256)
            top = inner.abs().amax(1).clamp_min(1e-12)
            chosen = ((inner / top[:, None])[..., None] - levels).abs().argmin(-1)
            made |= {".weight.absmax": chosen.flatten()[: absmax.numel()].to(torch.uint8)}
            made |= {".weight.nested_absmax": top, ".weight.nested_quant_map": levels}
            absmax = (levels[chosen] * top[:, None]).flatten()[: absmax.numel()] + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        else:
            made[".weight.absmax"] = absmax
        divisor = torch.where(absmax == 0, torch.ones_like(absmax), absmax)
        chosen = ((padded / divisor[:, None])[..., None] - code).abs().argmin(-1)
        plain = (code[chosen] * absmax[:, None]).flatten()[: flat.numel()].view(weight.shape)
        pairs = chosen.flatten()[: flat.numel()].view(-1, 2)
        made[".weight"] = ((pairs[:, 0] << 4) | pairs[:, 1]).to(torch.uint8)[:, None]
        made[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        return made, plain

    return make


def bnb_int8(weight: Tensor) -> Packed:
    """Pack rows of int8 as bitsandbytes does."""
    top = weight.abs().amax(1)
    packed = (weight / top[:, None] * 127).round().to(torch.int8)
    made = {".weight": packed, ".SCB": top, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return made, packed.float() * (top / 127)[:, None]


def scheme(kind: str, bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors."""
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **others}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "by module", "config_groups": groups, "ignore": ["lm_head"]}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
BLOCKS = {**FP8, "weight_block_size": [32, 32]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
OPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
OUT = {"stays_packed": False}
SAME = {"quantises": True, **OUT}
E8M0 = torch.float8_e8m0fnu

METHODS = {
    "fp8-blocks": Method("fp8", BLOCKS, blocks(32, 32), SAME),
    "fp8-blocks-that-do-not-divide": Method("fp8", {**FP8, "weight_block_size": [24, 40]}, blocks(24, 40), SAME),
    "fp8-blocks-of-128": Method("fp8", {**FP8, "weight_block_size": [128, 128]}, blocks(128, 128), SAME),
    "fp8-ue8m0": Method("fp8", {**BLOCKS, "scale_fmt": "ue8m0"}, blocks(32, 32, E8M0), SAME),
    "fp8-tensor": Method("fp8", STATIC, one_scale(()), SAME),
    "fp8-tensor-inverse": Method("fp8", STATIC, one_scale((1,), ".weight_scale_inv"), SAME),
    "fp8-rows": Method("fp8", FP8, rows_of_float8, SAME),
    "mxfp8": Method("fp8", {"quant_method": "mxfp8"}, blocks(1, 32, torch.uint8), {**SAME, "inner": 64}),
    "ct-float-rows": Method("compressed-tensors", scheme("float", 8, "channel"), rows_of_float8, OUT),
    "ct-float-tensor": Method("compressed-tensors", scheme("float", 8, "tensor"), one_scale((1,)), OUT),
    "ct-float-blocks": Method(
        "compressed-tensors",
        scheme("float", 8, "block", block_structure=[32, 32]),
        blocks(32, 32, name=".weight_scale"),
        OUT,
    ),
    "ct-int8": Method("compressed-tensors", scheme("int", 8, "channel"), int_quantized(None)),
    "ct-int8-groups": Method("compressed-tensors", scheme("int", 8, "group", group_size=16), int_quantized(16)),
    "ct-int8-asymmetric": Method(
        "compressed-tensors", scheme("int", 8, "channel", symmetric=False), int_quantized(None, symmetric=False), OUT
    ),
    "ct-int4": Method("compressed-tensors", scheme("int", 4, "group", group_size=16), pack_quantized(16)),
    "ct-int4-rows": Method("compressed-tensors", scheme("int", 4, "channel"), pack_quantized(None)),
    "ct-int4-asymmetric": Method(
        "compressed-tensors",
        scheme("int", 4, "group", group_size=16, symmetric=False),
        pack_quantized(16, symmetric=False),
    ),
    "ct-int4-act-order": Method(
        "compressed-tensors",
        scheme("int", 4, "group", group_size=16, actorder="group"),
        pack_quantized(16, act_order=True),
        OUT,
    ),
    "ct-int8-packed": Method(
        "compressed-tensors", scheme("int", 8, "group", group_size=16), pack_quantized(16, bits=8)
    ),
    "ct-int8-packed-tensor": Method("compressed-tensors", scheme("int", 8, "tensor"), packed_tensor),
    "ct-nvfp4": Method(
        "compressed-tensors", scheme("float", 4, "tensor_group", group_size=16), nvfp4(is_divisor=True), OUT
    ),
    "ct-mxfp4": Method(
        "compressed-tensors",
        scheme("float", 4, "group", group_size=32),
        mxfp4((".weight_packed", ".weight_scale"), in_blocks=False),
        {**OUT, "inner": 64},
    ),
    "int8": Method(
        "int8", scheme("int", 8, "channel") | {"format": "int-quantized"}, int_quantized(None), {"quantises": True}
    ),
    "awq": Method("awq", {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, awq(16)),
    "awq-groups-that-do-not-divide": Method("awq", {"quant_method": "awq", "bits": 4, "group_size": 40}, awq(40), OUT),
    "gptq": Method("gptq", GPTQ, gptq(16)),
    "gptq-rows": Method("gptq", {**GPTQ, "group_size": -1}, gptq(-1)),
    "gptq-asymmetric": Method("gptq", {**GPTQ, "sym": False}, gptq(16, symmetric=False)),
    "gptq-v2": Method(
        "gptq", {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(16, symmetric=False, version=2)
    ),
    "gptq-desc-act": Method("gptq", {**GPTQ, "desc_act": True}, gptq(16, act_order=True), OUT),
    "gptq-8": Method("gptq", {**GPTQ, "bits": 8}, gptq(16, bits=8)),
    "gptq-8-asymmetric": Method("gptq", {**GPTQ, "bits": 8, "sym": False}, gptq(16, bits=8, symmetric=False), OUT),
    "mxfp4": Method(
        "mxfp4", {"quant_method": "mxfp4"}, mxfp4(("_blocks", "_scales"), in_blocks=True), {**OUT, "inner": 64}
    ),
    "modelopt-nvfp4": Method("modelopt", OPT, nvfp4(is_divisor=False), OUT),
    "modelopt-fp8": Method("modelopt", {**OPT, "quant_algo": "FP8"}, one_scale(()), OUT),
    "modelopt-fp8-blocks": Method("modelopt", {**OPT, "quant_algo": "FP8_PB_WO"}, blocks_with_axes, OUT),
    "nf4": Method("bitsandbytes", BNB, nf4(nested=False), OUT),
    "nf4-nested": Method("bitsandbytes", BNB, nf4(nested=True), OUT),
    "nf4-in-bfloat16": Method("bitsandbytes", BNB, stored_as(torch.bfloat16, nf4(nested=True)), OUT),
    "bnb-int8": Method("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
}
"""Every way in which a built-in quantisation finds a matrix stored."""
