"""Experts in e2m1 on the float8 tensor cores equal those that are multiplied in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dovetail.contracts.layers import Act
from dovetail.sdk.quantization.forms import Mxfp4
from dovetail_backends.kernels.triton.nibbles import exponents_of
from dovetail_backends.kernels.triton.packed_experts import (
    FLOAT8_TILES,
    ExpertTiles,
    expert_tiles,
    packed_gated_experts,
)
from dovetail_backends.kernels.triton.packed_float8 import FLOAT8_ASM, fits_float8
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights
from dovetail_backends.kernels.triton.packed_weight import LEAST_NEAR, PackedWeight, mxfp4, stacked, weight_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM, HIDDEN, INNER, EXPERTS, TOP_K = 26, 160, 96, 3, 2
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter divides by zero


def random(*shape: int, seed: int) -> Tensor:
    """Random numbers that bfloat16 holds."""
    found = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)
    return found.to(torch.float32) if DEVICE.type == "cpu" else found  # the interpreter multiplies no bfloat16


def matrix(n: int, k: int, seed: int) -> PackedWeight:
    """One expert's matrix, with groups whose scales differ by up to 2 ** 11."""
    weight = random(n, k, seed=seed).float() * torch.logspace(0, -2, k // 32, device=DEVICE).repeat_interleave(32)
    return weight_of(Mxfp4(), Mxfp4().quantise(weight), torch.float32)


@pytest.mark.parametrize(("act", "weigh_input"), [("silu_and_mul", True), ("clamped_silu_and_mul", False)])
def test_it_equals_the_other_kernel(act: Act, weigh_input: bool) -> None:
    """Both halves, with biases, for widths that no tile divides; rows of an expert take several tiles."""
    up = stacked(matrix(2 * INNER, HIDDEN, seed) for seed in range(EXPERTS))
    down = stacked(matrix(HIDDEN, INNER, seed + 7) for seed in range(EXPERTS))
    assert fits_float8(up)
    assert fits_float8(down)
    biases = random(EXPERTS, 2 * INNER, seed=20), random(EXPERTS, HIDDEN, seed=21)
    weights = PackedExpertWeights(up, down, *biases, 0, act, weigh_input)
    x, tile = random(NUM, HIDDEN, seed=3), (64, 128, 4, 2)
    ids = torch.rand(NUM, EXPERTS, generator=torch.Generator().manual_seed(4)).topk(TOP_K).indices.to(DEVICE)
    shares, residual = random(NUM, TOP_K, seed=5).abs(), random(NUM, HIDDEN, seed=6)
    want = packed_gated_experts(x, ids, shares, weights, residual, tiles=ExpertTiles(32, tile, tile))
    tiles = ExpertTiles(16, tile, (64, 256, 4, 2), is_float8=True)
    found = packed_gated_experts(x, ids, shares, weights, residual, tiles=tiles)
    # What is between the halves has float32's bits in the interpreter, and loses them; its own is 2 ** -9 at most.
    assert (found - want).double().norm() <= 4e-3 * want.double().norm()


def test_few_rows_of_an_expert_are_multiplied_so() -> None:
    """In bfloat16, where scales are near each other; more rows are not, nor other dtypes or weights."""
    near = PackedWeight("mxfp4", torch.empty(32, 0), None, None, None, 32, 64, 64, is_near=True)
    far = PackedWeight("mxfp4", torch.empty(32, 0), None, None, None, 32, 64, 64)

    def chosen(up: PackedWeight, down: PackedWeight, slots: int, dtype: torch.dtype = torch.bfloat16) -> ExpertTiles:
        weights = PackedExpertWeights(up, down, None, None, 0, "silu_and_mul", False)
        return expert_tiles(weights, slots, dtype)

    for slots, tiles in ((64, FLOAT8_TILES[0]), (159, FLOAT8_TILES[0]), (160, FLOAT8_TILES[1]), (415, FLOAT8_TILES[1])):
        assert chosen(near, near, slots) == ExpertTiles(16, *tiles, is_float8=True)
    assert not chosen(near, near, 416).is_float8
    assert not chosen(near, near, 64, torch.float16).is_float8
    assert not chosen(near, far, 64).is_float8
    assert not chosen(far, near, 64).is_float8


def test_other_weights_are_refused() -> None:
    """Whoever asks for these tiles learns why not."""
    nibbles = torch.ones(2, 64, dtype=torch.uint8, device=DEVICE)
    far = mxfp4(nibbles, torch.tensor([[127, 1], [120, 120]], dtype=torch.uint8, device=DEVICE))
    weights = PackedExpertWeights(stacked([far]), stacked([far]), None, None, 0, "silu_and_mul", False)
    ids, tile = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), (64, 128, 4, 2)
    tiles = ExpertTiles(16, tile, tile, is_float8=True)
    with pytest.raises(ValueError, match="near each other"):
        packed_gated_experts(random(1, 64, seed=0), ids, random(1, 1, seed=1), weights, None, tiles=tiles)


def test_a_scale_far_below_the_greatest_is_left_to_the_other_kernel() -> None:
    """Unless all numbers of its group are zero."""
    nibbles = torch.ones(2, 64, dtype=torch.uint8)
    for scale, fits in ((127 - 127 + LEAST_NEAR, True), (LEAST_NEAR - 1, False), (0, False)):
        scales = torch.tensor([[127, scale], [120, 120]], dtype=torch.uint8)
        assert mxfp4(nibbles, scales).is_near == fits
        empty = nibbles.clone()
        empty[0, 32:] = 8  # minus zero
        assert mxfp4(empty, scales).is_near


def permuted(first: int, second: int, selector: int) -> int:
    """`prmt.b32`: four bytes of eight by the nibbles of a selector, whose upper bit asks for the byte's sign alone."""
    found = 0
    for place in range(4):
        by = selector >> (4 * place) & 15
        byte = (first | second << 32) >> (8 * (by & 7)) & 255
        found |= ((255 if byte & 128 else 0) if by & 8 else byte) << (8 * place)
    return found


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permuted,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mad.lo.s32": lambda a, b, c: a * b + c,
}


def executed(assembly: str, given: list[int]) -> list[int]:
    """What the assembly writes to `$0` to `$7`, from `$8` on being what it is given."""
    registers = {f"${8 + at}": value for at, value in enumerate(given)}

    def value(text: str) -> int:
        return registers[text] if text in registers else int(text, 0)

    for line in assembly.strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *args = (part.strip() for part in rest.split(","))
        made = INSTRUCTIONS[name](*(value(one) for one in args))
        registers[to] = made & 0xFFFFFFFF
    return [registers[f"${at}"] for at in range(8)]


@pytest.mark.parametrize("far", range(127 - LEAST_NEAR + 1))
def test_the_assembly_makes_float8_numbers(far: int) -> None:
    """All sixteen numbers, with every scale that fits, beside groups with the greatest: what the interpreter skips."""
    words = [0x76543210, 0xFEDCBA98, 0x0F1E2D3C, 0x89ABCDEF]
    scales = torch.tensor([[127, 127 - far]], dtype=torch.uint8)
    exponents = int(exponents_of(scales)[0][0, 0]) & 0xFFFF
    found = executed(str(FLOAT8_ASM.value), words + [exponents] * 4)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for word, given in enumerate(words):
        for half in range(2):
            data = found[2 * word + half].to_bytes(4, "little")
            made = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            nibbles = [given >> (4 * (4 * half + at)) & 15 for at in range(4)]
            want = torch.stack([-numbers[one & 7] if one & 8 else numbers[one & 7] for one in nibbles])
            assert torch.equal(made, want * 2.0 ** (6 - far * half))
