"""Kernels of Mamba 2 touch no memory but that of their operands, whatever the tile; in Triton's interpreter.

A run on an H200 ended with an illegal memory access when its benchmark tried other tiles than the default.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.contracts.kernels import make_ask, meaning
from dovetail.runtime.device.devices import device_of
from dovetail_testing.conformance.kernels_samples import sample

triton = pytest.importorskip("triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on CPU")
CPU = torch.device("cpu")
SHAPE = {"G": 2, "J": 2, "D": 24, "W": 40}
"""Neither width is a power of two, and blocks of values do not divide theirs."""


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address that a kernel loads from or stores to is within a tensor that the launch was given."""
    extents: list[tuple[int, int]] = []
    first, builder = interpreter.GridExecutor._init_args_hst, interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def given(self: Any, args: Any, kwargs: Any) -> Any:
        made = first(self, args, kwargs)
        values = [*made[0], *made[1].values()]
        tensors = [one for one in values if isinstance(one, Tensor)]
        assert tensors, "the interpreter is given tensors otherwise than it was"
        extents[:] = [
            (one.untyped_storage().data_ptr(), one.untyped_storage().data_ptr() + one.untyped_storage().nbytes())
            for one in tensors
        ]
        return made

    def check(ptrs: Any, mask: Any) -> None:
        live = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].astype(np.uint64)
        size = max(1, ptrs.dtype.scalar.element_ty.primitive_bitwidth // 8)
        inside = np.zeros(live.shape, dtype=bool)
        for start, end in extents:
            inside |= (live >= start) & (live + size <= end)
        assert inside.all(), f"{int((~inside).sum())} of {inside.size} addresses are outside of all operands"

    def loaded(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def stored(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", given)
    monkeypatch.setattr(builder, "create_masked_load", loaded)
    monkeypatch.setattr(builder, "create_masked_store", stored)


@triton.jit
def reach(x_ptr: Any, out_ptr: Any, num: Any) -> None:
    """Copy so many numbers of eight."""
    at = triton.language.arange(0, 8)
    triton.language.store(out_ptr + at, triton.language.load(x_ptr + at, mask=at < num), mask=at < num)


def test_an_address_beyond_an_operand_is_found() -> None:
    """By a number too many, in what is read and in what is written."""
    few, many = torch.zeros(7), torch.zeros(8)
    reach[(1,)](few, many, 7)
    for x, out in ((few, many), (many, few)):
        with pytest.raises(Exception, match="1 of 8 addresses are outside"):
            reach[(1,)](x, out, 8)


def run(op: str, rows: int, monkeypatch: pytest.MonkeyPatch, module: str, tile: tuple[int, ...]) -> None:
    """Compare an operation with its meaning."""
    from dovetail_backends.kernels.triton import TritonKernels, ssd, ssd_pieces

    if module == "ssd":
        monkeypatch.setattr(ssd, "tile", lambda dim, width: (triton.next_power_of_2(dim), *tile))
    else:
        monkeypatch.setattr(ssd_pieces, "tile", lambda width: tile)
    dims = SHAPE if op.endswith("_prefill") else {**SHAPE, "K": 4}
    ask = make_ask(op, device_of(CPU).view, "float32", dims, {}, invariant=module == "ssd")
    operands = sample(ask, rows, CPU, 3, is_strided=True)
    mine, right = ([one.clone() if isinstance(one, Tensor) else one for one in operands] for _ in range(2))
    torch.testing.assert_close(TritonKernels().make(ask)(*mine), meaning(ask)(*right), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine[-1], right[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("op", ["ssd_decode", "ssd_prefill"])
def test_every_tile_of_tokens_one_by_one_stays_within(op: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of decode steps and of prompts with `--batch-invariant`: warps say nothing to the interpreter."""
    run(op, 3 if op == "ssd_decode" else 9, monkeypatch, "ssd", (block, 4))


@pytest.mark.parametrize("block", [16, 32, 64])
def test_every_tile_of_pieces_stays_within(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts, of several requests, one within a piece."""
    run("ssd_prefill", 70, monkeypatch, "ssd_pieces", (block, 4, 2))
