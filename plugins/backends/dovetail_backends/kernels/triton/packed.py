"""Products with packed weights on CUDA: which kernel serves how many rows, and with which tile.

One row of 8-bit numbers has a kernel of its own, a few rows meet 4-bit numbers as integers, more rows of float8 go to
the float8 tensor cores, rounded where that is allowed. Other numbers become the model's dtype in registers, and for
many rows weights are written out before cuBLAS multiplies them.
`sdk.quantization.forms` is the reference. M rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import triton
from torch import Tensor

from dovetail.contracts.layers import Act, RMSScale
from dovetail.sdk.quantization.forms import Form
from dovetail_backends.kernels.triton.launch import Tile, has_tensor_memory, shared_bytes
from dovetail_backends.kernels.triton.norms import act_and_mul, rms_norm
from dovetail_backends.kernels.triton.packed_few import few
from dovetail_backends.kernels.triton.packed_halves import DEPTH, by_halves, fits_halves
from dovetail_backends.kernels.triton.packed_integers import by_integers, fits_integers, is_halved
from dovetail_backends.kernels.triton.packed_pairs import by_pairs, fits_pairs
from dovetail_backends.kernels.triton.packed_rounded import LEAST_ROWS, by_rounded, fits_rounded
from dovetail_backends.kernels.triton.packed_row import RowTile, row
from dovetail_backends.kernels.triton.packed_stacked import by_stacked, fits_stacked
from dovetail_backends.kernels.triton.packed_weight import PackedWeight, weight_of
from dovetail_backends.kernels.triton.packed_wide import fits_wide, wide
from dovetail_backends.kernels.triton.packed_write import many

MOST_ROWS = 128
"""Rows up to which numbers that are not float8 are taken apart in registers; measured on an H200 with int4."""
MOST_HALVES = 256
"""As `MOST_ROWS` for float8, where other kernels do not fit."""
MOST_PAIRS = 512
"""Rows up to which `by_stacked` and `by_pairs` multiply by float8: measured on an H200, where 2,048 are faster written
out."""
WIDE_ROWS = {"scaled": (65, 256), "int4": (33, 512), "mxfp4": (33, 512)}
"""Rows that packed weights are multiplied with by `wide`, by kind, if there are so many outputs that it fills the
device; measured on an H200 with fp8 and int4, up to 64 rows on an H100."""
WIDE_PROGRAMS, LEAST_WIDE_PROGRAMS = 132, 64
"""So many at most, where K is split: one for each multiprocessor of an H200; and so many at least."""
SHORT_PROGRAMS = 288
"""Likewise up to 64 rows: two programs for each multiprocessor, and a few that begin late."""
MOST_INTEGERS, MOST_HALVED = 4, 2
"""Rows up to which 4-bit weights are multiplied as integers, each row by itself; fewer with scales of 32 inputs."""
PROGRAMS, TALL_PROGRAMS = 400, 520
"""So many at most, where K is split to have more: three for each multiprocessor of an H200, four of more rows."""
BROAD_BYTES, LEAST_BROAD_PROGRAMS = 192 << 10, 96
"""Shared memory of a multiprocessor that `by_halves` uses for 128 outputs and up to 64 rows, and programs at least."""
ROW_TILES: dict[tuple[int, int], RowTile] = {
    (6144, 4096): (8, 2048, 8),
    (4096, 4096): (4, 2048, 2),
    (28672, 4096): (8, 512, 4),
    (4096, 14336): (4, 2048, 4),
}
"""Best tile for one row by the weight's `[N, K]`, measured on an H200 by `tests/benchmarks/quant_products.py`."""


def row_tile(weight: PackedWeight, *, gate: bool) -> RowTile:
    """Return the tile for one row: measured, or by analogy with the measured ones."""
    n, k = weight.num_out, weight.num_in
    wide = (n, k) in ROW_TILES or triton.next_power_of_2(k) >= 2048
    block_n, block_k, warps = ROW_TILES.get((n, k), (8, 512, 4) if gate or n * k >= 1 << 26 else (4, 2048, 4))
    return block_n, block_k if wide else min(block_k, triton.next_power_of_2(k)), warps


def integers_tile(weight: PackedWeight) -> RowTile:
    """Return the tile of `by_integers`: a short row takes no more than itself."""
    return 4, max(64, min(4096, triton.next_power_of_2(weight.num_in))), 4


def _splits(programs: int, steps: int, limit: int = PROGRAMS) -> int:
    """Return by how many K is split: a power of two, each with four steps or more."""
    found = 1
    while found < 8 and programs * found * 2 <= limit and steps >= found * 8:
        found *= 2
    return found


def _asked(tiles: int, steps: int, block_m: int, tile: Tile, *, gate: bool) -> int:
    """Return how many bytes the busiest multiprocessor reads for `by_halves`, up to the last one that adds up parts."""
    block_n, depth, _, _, splits = tile
    part = 4 * block_n * block_m if splits > 1 else 0
    step = depth * (block_n * (1 + gate) + 2 * block_m)
    return -(-tiles * splits // WIDE_PROGRAMS) * (-(-steps // splits) * step + part) + splits * part


def halves_tile(weight: PackedWeight, rows: int, *, gate: bool) -> tuple[int, Tile]:
    """Return the tile of `by_halves`; it is the same for all numbers of rows between two powers of two."""
    n = weight.num_out // 2 if gate else weight.num_out
    steps = -(-weight.num_in // DEPTH)
    block_m = next((size for size in (16, 32) if rows <= size), 64)
    if rows > 64:
        tall = 2 if rows <= 128 else 4
        splits = 1 if gate else min(4, _splits(-(-n // 128) * tall, steps, TALL_PROGRAMS))
        return block_m, (128, DEPTH, 8, 3, splits)
    stages = 3 if gate and block_m == 64 else 4
    usual: Tile = (64, DEPTH, 4, stages, 1 if gate else _splits(-(-n // 64), steps))
    # Every program reads both halves of all rows: of 64 rows twice as many bytes as 64 outputs have. So 128 outputs, if
    # the busiest multiprocessor then reads a tenth less. One program has the shared memory that two had.
    splits = 1 if gate else _splits(-(-n // 128), steps, WIDE_PROGRAMS)
    programs, is_small = -(-n // 128) * splits, 0 < shared_bytes(weight.numbers.device) < BROAD_BYTES
    room = BROAD_BYTES if gate or programs <= WIDE_PROGRAMS else BROAD_BYTES // 2
    # With a gate and 64 rows a fourth fits only beside sums in registers, and is measured only without groups.
    if not gate or block_m == 32 or (weight.groups == 0 and not has_tensor_memory(weight.numbers.device)):
        stages = room // (DEPTH * (128 * (1 + gate) + 2 * block_m))
    broad: Tile = (128, DEPTH, 8, stages, splits)
    before, after = (_asked(-(-n // one[0]), steps, block_m, one, gate=gate) for one in (usual, broad))
    fits = block_m > 16 and programs >= LEAST_BROAD_PROGRAMS and not is_small
    return block_m, broad if fits and after <= 0.9 * before else usual


def pairs_tile(weight: PackedWeight, rows: int, *, gate: bool) -> tuple[int, Tile]:
    """Return the tile of `by_pairs`, likewise; K is split as far as one program for each multiprocessor does it."""
    if gate:
        return (128, (128, DEPTH, 8, 3, 1)) if rows <= 256 else (64, (64, DEPTH, 4, 3, 1))
    programs = -(-weight.num_out // 128) * (1 if rows <= 128 else 2 if rows <= 256 else 4)
    return 128, (128, DEPTH, 8, 4, _splits(programs, -(-weight.num_in // DEPTH), WIDE_PROGRAMS))


def wide_tile(weight: PackedWeight, rows: int) -> tuple[int, Tile] | None:
    """Return the tile of `wide`, likewise, or None: other kernels have more programs for so small a weight."""
    if rows <= 64:  # two programs a multiprocessor; where K is the longer side, those of `few` split it as well
        programs = -(-weight.num_out // 128)
        splits = max(1, min(SHORT_PROGRAMS // programs, 8, weight.num_in // 640))
        is_tall = weight.num_out > weight.num_in and programs * splits >= LEAST_WIDE_PROGRAMS
        return (64, (128, 128, 8, 3, splits)) if is_tall else None
    programs = -(-weight.num_out // 256) * (1 if rows <= 128 else 2 if rows <= 256 else 4)
    is_deep = weight.kind != "scaled" or weight.groups == 0 or weight.group % 128 == 0
    depth, stages = (128, 3) if is_deep else (64, 4)
    splits = max(1, min(WIDE_PROGRAMS // programs, 8, weight.num_in // (8 * depth)))
    if programs * splits < LEAST_WIDE_PROGRAMS:
        return None
    if 2 * programs * splits <= WIDE_PROGRAMS:  # each takes half of the work, and there is a multiprocessor for each
        return 128, (128, depth, 8, 4, splits)
    return 128, (256, depth, 8, stages, splits)


def few_tile(weight: PackedWeight, rows: int, *, gate: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[int, Tile]:
    """Return the tile of `few` for rows in a dtype, likewise: one that fits into shared memory."""
    n, k = weight.num_out // 2 if gate else weight.num_out, weight.num_in
    if dtype == torch.float32:  # which no tensor core multiplies
        return 16 if rows <= 16 else 32, (64, 64, 4, 2, 1 if gate else _splits(-(-n // 64), -(-k // 64)))
    block_m = next((size for size in (16, 32) if rows <= size), 64)
    if weight.kind != "scaled":
        # Eight registers' worth of numbers come out of one: a short tile leaves room for more programs beside it.
        if block_m == 64:
            if gate:
                return block_m, (64, 128, 4, 4, 1)
            return block_m, (128, 128, 8, 3, _splits(-(-n // 128), -(-k // 128)))
        splits = 1 if gate else _splits(-(-n // 64), -(-k // 256), TALL_PROGRAMS)
        return block_m, (64, 256, 4, 4 if block_m == 16 else 3, splits)
    block_n, warps = (128, 8) if block_m == 64 else (64 if gate or block_m == 16 else 128, 4)
    depth = 128 if weight.group % 128 == 0 else 64  # a scale for each number of a tile takes four times its memory
    return block_m, (block_n, depth, warps, 3, 1 if gate else _splits(-(-n // block_n), -(-k // depth)))


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    *,
    norm: RMSScale | None = None,
    act: Act | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`act(norm(x) Wᵀ + b) + residual` with what of that is given.

    Args:
        x: `[M, K]`.
        weight: Of N outputs, of 2 N with `act`.
        bias: One per output of the weight, or None.
        norm: An RMS norm before the product.
        act: Made of gate and up, which the product is side by side.
        residual: `[M, N]`.

    Returns:
        `[M, N]` in the dtype of `x`.
    """
    rows, gate = len(x), act is not None
    gated = partial(act_and_mul, act=act or "silu_and_mul")
    normed = None if norm is None else partial(rms_norm, weight=norm.weight, eps=norm.eps)
    x = x if x.stride(-1) == 1 else x.contiguous()
    around = {} if norm is None else {"norm": norm.weight, "eps": norm.eps}
    if rows == 1 and weight.kind == "scaled":
        return row(x, weight, bias, row_tile(weight, gate=gate), act=act, residual=residual, **around)  # type: ignore[arg-type]
    most = MOST_HALVED if is_halved(weight) else MOST_INTEGERS
    if 0 < rows <= most and x.dtype != torch.float32 and fits_integers(weight):
        return by_integers(x, weight, bias, integers_tile(weight), act=act, residual=residual, **around)  # type: ignore[arg-type]
    if rows >= LEAST_ROWS and x.dtype == torch.bfloat16 and fits_rounded(weight):
        return by_rounded(x, weight, bias, act=act, residual=residual, **around)  # type: ignore[arg-type]
    if 64 < rows <= MOST_PAIRS and x.dtype == torch.bfloat16 and fits_pairs(weight):
        if fits_stacked(weight):
            return by_stacked(x, weight, bias, act=act, residual=residual, **around)  # type: ignore[arg-type]
        tile = pairs_tile(weight, rows, gate=gate)
        return by_pairs(x, weight, bias, tile, act=act, residual=residual, **around)  # type: ignore[arg-type]
    least, most = WIDE_ROWS[weight.kind]
    if least <= rows <= most and x.dtype != torch.float32 and fits_wide(weight):
        broad = wide_tile(weight, rows)
        if broad is not None:
            x = x if normed is None else normed(x)
            if act is None:
                return wide(x, weight, bias, broad, residual=residual)
            y = gated(wide(x, weight, bias, broad))
            return y if residual is None else residual + y
    if 0 < rows <= MOST_HALVES and x.dtype == torch.bfloat16 and fits_halves(weight):
        return by_halves(x, weight, bias, halves_tile(weight, rows, gate=gate), act=act, residual=residual, **around)  # type: ignore[arg-type]
    if normed is not None:  # in the kernel it would be computed once for each tile, and K could not be split
        x = normed(x)
    if 0 < rows <= MOST_ROWS:
        return few(x, weight, bias, few_tile(weight, rows, gate=gate, dtype=x.dtype), act=act, residual=residual)
    y = many(x, weight, bias)
    y = y if act is None else gated(y)
    return y if residual is None else residual + y


class TritonPacked:
    """The operation `packed_linear`."""

    product = staticmethod(linear)

    def __init__(self, dtype: torch.dtype, *, form: Form, act: Act | None = None) -> None:
        self._dtype, self._form, self._act = dtype, form, act

    def keeps(self, half: str = "") -> bool:
        """See `PackedKernel.keeps`."""
        return False

    def pack(self, tensors: Mapping[str, Tensor], half: str = "") -> PackedWeight:
        """See `PackedKernel.pack`."""
        return weight_of(self._form, tensors, self._dtype)

    def __call__(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """`x Wᵀ + b`."""
        return self.product(x, weight, bias)


class TritonNormedPacked(TritonPacked):
    """The operations `packed_norm_linear` and, with an activation, `packed_norm_gate`."""

    def __call__(  # type: ignore[override]  # another operation
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        weight: PackedWeight,
        bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`act(norm(x) Wᵀ + b) + residual`."""
        rms = None if norm is None else RMSScale(norm, eps)
        return self.product(x, weight, bias, norm=rms, act=self._act, residual=residual)
