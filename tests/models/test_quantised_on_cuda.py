"""What a checkpoint's headers become on CUDA: which matrices stay packed, and which are written out, and why."""

from __future__ import annotations

import pytest

from dovetail.contracts.quantization import Conversion, FileTensor, Target
from dovetail.layers.packed_forms import stays_packed
from dovetail_backends.quantization.fp8 import Fp8

CUDA = Target("bfloat16", "cuda")


def conversion(path: str, scale: tuple[int, ...], block: list[int]) -> Conversion:
    """Of one fp8 weight `[256, 512]`."""
    tensors = {
        "m.weight": FileTensor("m.weight", "F8_E4M3", (256, 512), path, 512),
        "m.weight_scale_inv": FileTensor("m.weight_scale_inv", "F32", scale, path, 512),
    }
    (found,) = Fp8.conversions({"quant_method": "fp8", "weight_block_size": block}, tensors, CUDA)
    return found


@pytest.mark.parametrize(("scale", "block"), [((2, 4), [128, 128]), ((256, 1), [128, 128]), ((), [128, 128])])
def test_fp8_stays_packed_on_cuda(scale: tuple[int, ...], block: list[int]) -> None:
    """With scales for blocks of 128 inputs, rows, or all of it: only the scales are converted."""
    found = conversion("layers.0.mlp.down", scale, block)
    assert [tensor.dtype for tensor in found.results] == ["F32"]
    assert not found.note


def test_other_blocks_are_written_out() -> None:
    """The kernels for float8 know no scales of fewer inputs."""
    found = conversion("layers.0.mlp.down", (8, 16), [32, 32])
    assert [tensor.dtype for tensor in found.results] == ["BF16"]
    assert "no product for it on cuda" in found.note


def test_experts_of_fp8_are_written_out_and_the_note_says_why() -> None:
    """Packed they are slower at one token."""
    found = conversion("layers.0.mlp.experts.down", (2, 4), [128, 128])
    assert [tensor.dtype for tensor in found.results] == ["BF16"]
    assert found.note == "float8_e4m3fn written out: experts are faster so"


def test_what_stays_packed_where() -> None:
    """On CPU what torch has products for, on CUDA more."""
    numbers = ("int8", "int4", "float8_e4m3fn", "mxfp4")
    assert [stays_packed(each, "cpu") for each in numbers] == [True, True, False, False]
    assert all(stays_packed(each, "cuda", 128) for each in numbers)
    assert stays_packed("float8_e4m3fn", "cuda", None)
    assert not stays_packed("float8_e4m3fn", "cuda", 32)
