"""What the loader makes of packed tensors, bit for bit: over odd sizes, groups, orders, and scales that are zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_transforms import BLOCKS, numbers, of_table, unpacked
from torch import Tensor

from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.sdk.quantization.forms import E2M1, Int4, Mxfp4, Scaled
from dovetail.sdk.quantization.words import ORDER
from dovetail_backends.gguf.blocks import BY_NAME
from dovetail_backends.quantization import awq, bitsandbytes, fp4, fp8, gguf_blocks, gptq, modules
from dovetail_backends.quantization.compressed_tensors import pack_quantized
from dovetail_testing.targets import target_for

NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.float16: "F16", torch.float32: "F32", torch.bfloat16: "BF16"}
NAMES |= {torch.uint8: "U8", torch.int32: "I32", torch.int8: "I8", torch.int64: "I64"}
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output each nibble of AutoAWQ's words holds."""
SIZES = ((8, 64, 32), (24, 96, 40), (8, 96, 96), (72, 160, 16), (1032, 320, 64), (4104, 264, 8))
"""N, K and a group that may not divide; the last ones are more than is computed at a time."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def words(*shape: int, seed: int = 0) -> Tensor:
    """Return random words."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)


def some_bytes(*shape: int, seed: int = 0) -> Tensor:
    """Return random bytes."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def scales(*shape: int) -> Tensor:
    """Return scales, some of them zero, some negative, some the least that there are."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    made.flatten()[::5] = 0
    made.flatten()[1::7] = 2.0**-24
    return made


def same(mine: Tensor, right: Tensor) -> None:
    """Compare bit by bit, but zeros by value, and NaN with any other."""
    assert (mine.shape, mine.dtype) == (right.shape, right.dtype)
    if mine.is_floating_point():
        assert torch.equal(mine.isnan(), right.isnan())
        mine, right = mine.nan_to_num(nan=0), right.nan_to_num(nan=0)
    assert torch.equal(mine, right)


def module(tensors: dict[str, Tensor], num_in: int) -> modules.Module:
    """Return a module of the model with some tensors, by suffix."""
    made = {end: FileTensor(f"m{end}", NAMES[t.dtype], tuple(t.shape), "m", num_in) for end, t in tensors.items()}
    return modules.Module("m.weight", made)


def made_by(conversion: Conversion, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert, by names behind the module's."""
    found = conversion.convert({f"m{end}": tensor for end, tensor in tensors.items()})
    return {name.removeprefix("m.weight"): tensor for name, tensor in found.items()}


def target(dtype: torch.dtype) -> Target:
    """Return what is read for."""
    return target_for(str(dtype).removeprefix("torch."))


def packed_as(values: Tensor, zeros: Tensor, scale: Tensor, found: dict[str, Tensor]) -> None:
    """See that words, scales and zeros are those of the shared form."""
    same(unpacked(found["_packed"], 4, 1, ORDER), values)
    same(found["_scale"], scale)
    same(found["_zero"].long(), zeros)


@pytest.mark.parametrize(
    ("shape", "group"), [((6, 4), (1, 16)), ((6, 1), (1, 64)), ((6,), (1, 64)), ((1,), (6, 64)), ((2, 2), (4, 32))]
)
def test_a_scale_of_fp8_says_whose_it_is(shape: tuple[int, ...], group: tuple[int, int]) -> None:
    """Of some columns of a row, of a row, of all, or of a block of 4 x 32 numbers."""
    stored = module({".weight": some_bytes(6, 64).view(torch.float8_e4m3fn), ".weight_scale": torch.ones(shape)}, 64)
    assert fp8.layout_of(stored, ".weight_scale", (4, 32), frozenset()) == group


@pytest.mark.sampled
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", ["neighbours", "desc_act"])
@pytest.mark.parametrize(("num_out", "num_in", "group"), SIZES)
def test_gptq(num_out: int, num_in: int, group: int, order: str, bits: int, version: int) -> None:
    """In 4 and 8 bits, with zeros of both formats, in an order or not: packed, or written out in each dtype."""
    num = -(-num_in // group)
    groups = torch.arange(num_in) // group
    if order == "desc_act":
        groups = groups[torch.randperm(num_in, generator=torch.Generator().manual_seed(5))]
    tensors = {".qweight": words(num_in * bits // 32, num_out), ".qzeros": words(num, num_out * bits // 32, seed=1)}
    tensors |= {".scales": scales(num, num_out).half(), ".g_idx": groups.to(torch.int32)}
    config = {"bits": bits, "group_size": group, "sym": False, "desc_act": order == "desc_act"}
    config["checkpoint_format"] = gptq.FORMATS[version - 1]
    stored = module(tensors, num_in)
    layout = gptq.layout_of(stored, config)
    values = unpacked(tensors[".qweight"], bits, 0).T
    zeros = ((unpacked(tensors[".qzeros"], bits, 1) + (version == 1)) % (1 << bits)).T
    for dtype in DTYPES:
        conversion = gptq.integers(stored, layout, target(dtype), gptq._reader(stored, config, layout))
        found = made_by(conversion, tensors)
        if "_packed" in found:
            assert bits == 4
            assert num_in % group == 0
            packed_as(values, zeros, tensors[".scales"].T, found)
        else:
            same(found[""], numbers(values, zeros, tensors[".scales"].T, groups, dtype))


@pytest.mark.parametrize(("num_out", "num_in", "group"), [*SIZES, (16, 52, 52), (24, 20, 8)])
def test_awq(num_out: int, num_in: int, group: int) -> None:
    """Words along outputs, packed or written out, with inputs that are no whole words, too."""
    num = -(-num_in // group)
    tensors = {".qweight": words(num_in, num_out // 8), ".qzeros": words(num, num_out // 8, seed=1)}
    tensors[".scales"] = scales(num, num_out).half()
    values, zeros = (unpacked(tensors[name], 4, 1, AWQ).T for name in (".qweight", ".qzeros"))
    integers = awq.read(group, tensors)
    groups = torch.arange(num_in) // group
    for dtype in DTYPES:
        same(integers.written_out(dtype), numbers(values, zeros, tensors[".scales"].T, groups, dtype))
    stored = {f"m{end}": each for end, each in tensors.items()}
    headers = {name: FileTensor(name, NAMES[t.dtype], tuple(t.shape), "m", num_in) for name, t in stored.items()}
    (conversion,) = awq.Awq.conversions({"group_size": group}, headers, target(torch.bfloat16))
    found = made_by(conversion, tensors)
    if "_packed" in found:
        packed_as(values, zeros, tensors[".scales"].T, found)
    else:
        assert num_in % group or num_in % 8
        same(found[""], numbers(values, zeros, tensors[".scales"].T, groups, torch.bfloat16))


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize(("num_out", "num_in", "group"), [(5, 64, 32), (1031, 320, 64), (24, 120, 24), (9, 60, 20)])
def test_words_of_compressed_tensors(num_out: int, num_in: int, group: int, has_order: bool) -> None:
    """Rows of any number, inputs that are no whole words, in an order or not."""
    num = num_in // group
    groups = torch.arange(num_in) // group
    tensors = {".weight_packed": words(num_out, -(-num_in // 8)), ".weight_scale": scales(num_out, num).bfloat16()}
    tensors |= {".weight_zero_point": words(-(-num_out // 8), num, seed=1)}
    if has_order:
        groups = groups.flip(0).roll(3)
        tensors[".weight_g_idx"] = groups.to(torch.int32)
    values = unpacked(tensors[".weight_packed"], 4, 1)[:, :num_in]
    zeros = unpacked(tensors[".weight_zero_point"], 4, 0)[:num_out]
    stored = module(tensors, num_in)
    for dtype in DTYPES:
        (conversion,) = pack_quantized(
            stored, {4}, target(dtype), frozenset({group}), is_shifted=True, is_ordered=False
        )
        found = made_by(conversion, tensors)
        if "_packed" in found:
            packed_as(values, zeros, tensors[".weight_scale"], found)
        else:
            same(found[""], numbers(values, zeros, tensors[".weight_scale"], groups, dtype))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 32), (3, 96), (1031, 320), (5, 4864)])
def test_tables_of_four_bits(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    """nf4, whose blocks go over rows' ends, nvfp4 and mxfp4, with scales that are zero or not finite."""
    packed, e2m1 = some_bytes(num_out, num_in // 2), torch.tensor(E2M1)
    blocks = -(-num_out * num_in // 64)
    table, absmax = torch.linspace(-1, 1, 16), scales(blocks)
    text = f'{{"blocksize": 64, "shape": [{num_out}, {num_in}]}}'.encode()
    state = {".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8)}
    state |= {".weight": packed.view(-1, 1), ".weight.absmax": absmax, ".weight.quant_map": table}
    mine = bitsandbytes.four_bit_numbers("m", (num_out, num_in), state, dtype)
    same(mine, of_table(packed.view(1, -1), table, absmax[None], 64, dtype, high=True).view(num_out, num_in))

    eighths, whole = scales(num_out, num_in // 16).to(torch.float8_e4m3fn), torch.tensor(0.37)
    eighths.view(torch.uint8).flatten()[2::11] = 0x7F
    tensors = {".weight": packed, ".weight_scale": eighths, ".weight_scale_2": whole}
    for divides in (False, True):
        conversion = fp4.nvfp4(
            module(tensors, num_in), ".weight", ".weight_scale", ".weight_scale_2", target(dtype), divides=divides
        )
        scale = eighths.float()
        scale = scale / whole if divides else scale * whole
        same(made_by(conversion, tensors)[""], of_table(packed, e2m1, scale, 16, dtype, high=False))

    powers = some_bytes(num_out, num_in // 32, seed=2)
    powers.flatten()[:3] = torch.tensor([0, 255, 127], dtype=torch.uint8)[: powers.numel()]
    right = of_table(packed, e2m1, torch.exp2(powers.float() - 127), 32, dtype, high=False)
    same(Mxfp4().dequantise({"weight_packed": packed, "weight_scale": powers}, dtype), right)


@pytest.mark.sampled
@pytest.mark.parametrize("group", [None, 40, 32])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_out", [1, 7, 2051])
def test_numbers_of_eight_bits(num_out: int, kind: torch.dtype, group: int | None) -> None:
    """With a scale for each row, or for groups that divide or not: what was given stays as it was."""
    weight, size = some_bytes(num_out, 160).view(kind), group or 160
    scale = scales(num_out, -(-160 // size))
    before = weight.clone()
    for dtype in DTYPES:
        right = (weight.float() * scale.repeat_interleave(size, 1)[:, :160]).to(dtype)
        same(Scaled(kind, group).dequantise({"weight": weight, "weight_scale": scale}, dtype), right)
    assert torch.equal(weight.view(torch.uint8), before.view(torch.uint8))


def test_integers_in_four_bits_keep_their_tensors() -> None:
    """What is computed in place is a copy: a matrix that is written out for each product stays right."""
    tensors = {"weight_packed": words(9, 16), "weight_scale": scales(9, 4).bfloat16()}
    tensors["weight_zero"] = some_bytes(9, 4) & 15
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    values, groups = unpacked(tensors["weight_packed"], 4, 1, ORDER), torch.arange(128) // 32
    for _ in range(2):
        right = numbers(values, tensors["weight_zero"], tensors["weight_scale"], groups, torch.bfloat16)
        same(Int4(32, has_zero=True).dequantise(tensors, torch.bfloat16), right)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", gguf_blocks.READERS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (700, 8), (2, 5, 3)])
def test_blocks_of_gguf(kind: str, shape: tuple[int, ...]) -> None:
    """Every type over random bytes, whatever their scales are, in rows and in experts."""
    block = BY_NAME[kind]
    rows = some_bytes(*shape[:-1], shape[-1] * block.size)
    before = rows.clone()
    for dtype in DTYPES:
        right = BLOCKS[kind](rows.reshape(-1, block.size)).view(*shape[:-1], -1).to(dtype)
        same(gguf_blocks.numbers(kind, rows, dtype), right)
    assert torch.equal(rows, before)


def test_blocks_of_gguf_that_stay_packed() -> None:
    """Q4_0 becomes words of neighbouring inputs, of many rows as of one."""
    from dovetail_backends.quantization.gguf import _packed

    for num_out, num in ((1, 1), (2051, 9)):
        rows = some_bytes(num_out, num * 18)
        conversion = _packed(FileTensor("m.weight", "Q4_0", tuple(rows.shape), "m", num * 32))
        found: dict[str, Any] = dict(conversion.convert({"m.weight": rows}))
        made = Int4(32, torch.float16).dequantise(
            {"weight_packed": found["m.weight_packed"], "weight_scale": found["m.weight_scale"]}, torch.float32
        )
        same(made, BLOCKS["Q4_0"](rows.view(-1, 18)).view(num_out, -1))
