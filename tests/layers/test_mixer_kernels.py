"""Triton's kernels of recurrent layers equal their meanings, in the interpreter; widths: `test_kernels.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.kernels import make_ask, meaning
from dovetail.runtime.device.devices import device_of
from dovetail_testing.conformance.kernels_mixers import options, places
from dovetail_testing.conformance.kernels_samples import sample

CPU = torch.device("cpu")


def copied(operands: list[Any]) -> list[Any]:
    """The same, to be written to."""
    return [one.clone() if isinstance(one, Tensor) else one for one in operands]


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "is_strided"), [(0, False), (1, True)], ids=["in a row", "odd widths, slices"])
@pytest.mark.parametrize(
    ("op", "invariant"),
    [("conv_qkv", False), ("short_conv_prefill", False), ("short_conv_decode", False), ("gdn_prefill", False),
     ("gdn_prefill", True), ("gdn_decode", False), ("selective_scan_prefill", False), ("selective_scan_decode", False),
     ("kda_prefill", False), ("kda_prefill", True), ("kda_decode", False),
     ("gated_rms_norm", False), ("ssd_prefill", False), ("ssd_prefill", True), ("ssd_decode", False)],
)  # fmt: skip
def test_a_kernel_equals_its_meaning(op: str, invariant: bool, shape: int, is_strided: bool) -> None:
    """What it returns, and the states, rings and copies that it writes; of several requests, one without a token."""
    pytest.importorskip("triton")
    from dovetail_backends.kernels.triton import TritonKernels

    dims = places(op)
    assert dims is not None
    ask = make_ask(op, device_of(CPU).view, "float32", dims[shape], options(op)[-1], invariant=invariant)
    kernel, plain = TritonKernels().make(ask), meaning(ask)
    for rows in (1, 9 if op.endswith("_decode") else 70):  # more requests of a token each are more of the same
        operands = list(sample(ask, rows, CPU, 3, is_strided=is_strided))
        mine, right = copied(operands), copied(operands)
        torch.testing.assert_close(kernel(*mine), plain(*right), rtol=1e-4, atol=1e-4)
        changed = 0
        for got, want, was in zip(mine, right, operands, strict=True):
            if isinstance(want, Tensor):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
                changed += not torch.equal(want, was)
        assert changed >= (op != "gated_rms_norm"), "no state was written"


@pytest.mark.parametrize(
    ("op", "dims"),
    [("gdn_decode", {"G": 1, "J": 1, "D": 12, "W": 160}), ("ssd_decode", {"G": 1, "J": 2, "D": 12, "W": 96}),
     ("ssd_decode", {"G": 1, "J": 1, "D": 256, "W": 8}), ("kda_decode", {"G": 1, "D": 12, "W": 192})],
    ids=["Gated DeltaNet", "Mamba 2", "narrow heads", "KDA"],
)  # fmt: skip
def test_a_decode_step_goes_through_any_number_of_blocks_of_values(op: str, dims: dict[str, int]) -> None:
    """Five, three, one and six: fewer than the next power of two, which is what a program has of its values."""
    pytest.importorskip("triton")
    from dovetail_backends.kernels.triton import TritonKernels

    ask = make_ask(op, device_of(CPU).view, "float32", {**dims, "K": 4}, options(op)[0])
    operands = list(sample(ask, 3, CPU, 3, is_strided=False))
    mine, right = copied(operands), copied(operands)
    torch.testing.assert_close(TritonKernels().make(ask)(*mine), meaning(ask)(*right), rtol=1e-4, atol=1e-4)
    for got, want in zip(mine, right, strict=True):
        if isinstance(want, Tensor):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_convolution_has_all_channels_of_many_programs() -> None:
    """Keys, queries and values that are wider than what one program convolves."""
    pytest.importorskip("triton")
    from dovetail_backends.kernels.triton import TritonKernels
    from dovetail_backends.kernels.triton.delta_pieces import CHANNELS

    dims = {"G": 2, "J": 1, "D": CHANNELS, "W": CHANNELS, "K": 4}
    ask = make_ask("conv_qkv", device_of(CPU).view, "float32", dims, options("conv_qkv")[-1])
    operands = list(sample(ask, 5, CPU, 3, is_strided=False))
    mine, right = copied(operands), copied(operands)
    torch.testing.assert_close(TritonKernels().make(ask)(*mine), meaning(ask)(*right))
    for got, want in zip(mine, right, strict=True):
        assert not isinstance(want, Tensor) or torch.equal(got, want)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("op", "invariant"),
    [("gdn_prefill", False), ("gdn_prefill", True), ("gdn_decode", False),
     ("ssd_prefill", False), ("ssd_prefill", True), ("ssd_decode", False),
     ("selective_scan_prefill", True), ("selective_scan_decode", False),
     ("kda_prefill", False), ("kda_prefill", True), ("kda_decode", False)],
)  # fmt: skip
def test_states_in_fewer_bits_are_rounded_where_the_meaning_rounds(
    op: str, invariant: bool, dtype: torch.dtype
) -> None:
    """States and copies in another dtype: what is read and kept is the meaning's but for last bits."""
    pytest.importorskip("triton")
    from dovetail_backends.kernels.triton import TritonKernels

    dims = places(op)
    assert dims is not None
    ask = make_ask(op, device_of(CPU).view, "float32", dims[0], options(op)[0], invariant=invariant)
    is_prompt = op.endswith("_prefill")
    operands = list(sample(ask, 100 if is_prompt else 9, CPU, 3, is_strided=False))
    kept = range(len(operands) - 1 - is_prompt, len(operands))
    wide = copied(operands)
    for i in kept:
        operands[i] = operands[i].to(dtype)
    mine, right = copied(operands), copied(operands)
    got, want, without = TritonKernels().make(ask)(*mine), meaning(ask)(*right), meaning(ask)(*wide)
    last = (16 if invariant else 2) * torch.finfo(dtype).eps  # what is rounded otherwise once is read by later tokens
    torch.testing.assert_close(got, want, rtol=last, atol=last)
    assert not torch.equal(want, without), "nothing was rounded"
    for i in kept:
        assert mine[i].dtype == dtype
        torch.testing.assert_close(mine[i].float(), right[i].float(), rtol=last, atol=last)
        assert not torch.equal(right[i], operands[i])


@pytest.mark.parametrize("shape", [0, 1], ids=["narrow", "wide"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("num", [0, 5, 16])
def test_a_norm_of_groups_equals_its_meaning(num: int, norm_first: bool, shape: int) -> None:
    """With a weight, and without one, as of 16 rows; of slices."""
    pytest.importorskip("triton")
    from dovetail_backends.kernels.triton import TritonKernels

    dims = places("gated_group_norm")
    assert dims is not None
    ask = make_ask("gated_group_norm", device_of(CPU).view, "float32", dims[shape], {"norm_first": norm_first})
    operands = sample(ask, num, CPU, 3, is_strided=True)
    kernel, plain = TritonKernels().make(ask), meaning(ask)
    torch.testing.assert_close(kernel(*operands), plain(*operands), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "op",
    ["conv_qkv", "short_conv_prefill", "short_conv_decode", "gdn_prefill", "gdn_decode", "gated_rms_norm",
     "sigmoid_gate", "ssd_prefill", "ssd_decode", "selective_scan_prefill", "selective_scan_decode",
     "kda_prefill", "kda_decode"],
)  # fmt: skip
def test_nothing_comes_of_no_rows(op: str) -> None:
    """A kernel and its meaning take a step without tokens, and write to no state."""
    pytest.importorskip("triton")
    from dovetail_backends.kernels.triton import TritonKernels

    dims = places(op)
    ask = make_ask(op, device_of(CPU).view, "float32", {"N": 6, "D": 8} if dims is None else dims[0], options(op)[0])
    for compute in (TritonKernels().make(ask), meaning(ask)):
        operands = list(sample(ask, 0, CPU, 3, is_strided=False))
        given = copied(operands)
        result = compute(*given)
        assert all(one.numel() == 0 for one in (result if isinstance(result, tuple) else (result,)))
        for got, was in zip(given, operands, strict=True):
            assert not isinstance(was, Tensor) or torch.equal(got, was)
