"""Attention over a prefix that decode rows have in common, read once for a group of them.

Rows behind one prompt would each read its keys again. Here GROUP neighbouring rows are one block of queries, as in a
prefill: `_prefix_kernel` attends them to the tokens that neighbours among them share, and the decode kernel starts
these rows behind the tokens and adds the parts up. A group has one such run of rows, the one that saves most; its other
rows read all of their own. (Known as cascade attention; partial softmaxes are summed as in FlashDecoding,
arXiv:2311.01282.)

What is shared is found on the device, once per step, by comparing page tables: a graph serves whatever rows come.

B decode rows, Hq and Hk query and KV heads, G = Hq / Hk, D and Dv widths of keys and values, P page size, N groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.triton.eight_bits import by_unit, unpacked
from dovetail_backends.triton.kv import Pair, Scales, block_of_width, scale_arguments
from dovetail_backends.triton.tiles import capped, load_whole, of_values, rotated

LOG2E = 1.4426950408889634
MAX_ROWS = 16
MAX_QUERIES = 64
"""Queries of one program, rows times G; half of it for values wider than 256, whose sums take twice the registers."""
TILE = 64
"""Shared tokens are a multiple of it, and it is one of every tile's size."""
PROGRAMS = 256
MAX_SPLITS = 32


@triton.jit
def _plan_kernel(
    page_table, rows, seq_lens, slots, behind, groups, num, stride_table,
    GROUP: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per group: the run of live neighbours that saves most, and how many leading tokens they share."""
    group = tl.program_id(0)
    r = tl.arange(0, GROUP)
    b = group * GROUP + r
    inner = (r < GROUP - 1) & (b + 1 < num)
    pair = inner & (tl.load(slots + b, mask=inner, other=-1) >= 0) & (tl.load(slots + b + 1, mask=inner, other=-1) >= 0)
    lens, next_lens = tl.load(seq_lens + b, mask=pair, other=1), tl.load(seq_lens + b + 1, mask=pair, other=1)
    # Of a row and the next: the newest token is each row's own.
    most = (tl.minimum(lens, next_lens) - 1).to(tl.int32)
    num_pages = (most + P - 1) // P
    row = tl.load(rows + b, mask=b < num, other=0)
    table = page_table + row * stride_table
    next_table = page_table + tl.load(rows + b + 1, mask=pair, other=0) * stride_table
    same, at, end = num_pages, 0, tl.max(num_pages, 0)
    while at < end:
        places = at + tl.arange(0, BLOCK)
        inside = places[None, :] < num_pages[:, None]
        pages = tl.load(table[:, None] + places[None, :], mask=inside, other=0)
        next_pages = tl.load(next_table[:, None] + places[None, :], mask=inside, other=0)
        same = tl.minimum(same, tl.min(tl.where(pages != next_pages, places[None, :], 2147483647), 1))
        end = tl.max(tl.where(same == num_pages, num_pages, 0), 0)
        at += BLOCK
    tokens = tl.minimum(same * P, most) // TILE * TILE
    # The run i … j shares the least that two neighbours in it do, and all but one of its rows are saved that.
    i, j = r[:, None], r[None, :]
    between = (r[None, None, :] >= i[:, :, None]) & (r[None, None, :] < j[:, :, None])
    least = tl.min(tl.where(between, tokens[None, None, :], 2147483647), 2)
    saved = tl.where(j > i, least, 0) * (j - i)
    chosen = tl.min(tl.min(tl.where(saved == tl.max(tl.max(saved, 1), 0), i * GROUP + j, GROUP * GROUP), 1), 0)
    first, last = chosen // GROUP, chosen % GROUP
    length = tl.max(tl.max(tl.where((i == first) & (j == last) & (j > i), least, 0), 1), 0)
    tl.store(behind + b, tl.where((r >= first) & (r <= last), length, 0), mask=b < num)
    tl.store(groups + group, length)
    tl.store(groups + tl.num_programs(0) + group, tl.sum(tl.where(r == first, row, 0), 0).to(tl.int32))


@triton.jit
def _prefix_kernel(
    q, k, v, page_table, groups, weight, cos, sin, part, part_max, part_sum, k_scale, v_scale,
    scale, eps, num, stride_qb, stride_qh, stride_table, stride_page, stride_token, stride_head,
    stride_scale_page, stride_scale_token,
    GROUP: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, STAGES: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr, CAP: tl.constexpr,
    SCALED: tl.constexpr, E4M3: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (group, KV head, split): tiles `split, split + NUM_SPLITS, …` of the shared tokens, for every row."""
    if PDL:
        gdc_launch_dependents()
        # By every program, also one that has nothing to do: the kernel after the next relies on all before it.
        gdc_wait()
    G: tl.constexpr = HQ // HK
    group, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(groups + group)
    start = split * BLOCK_N
    if start < length:
        m, d, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        b, heads = (group * GROUP + m // G).to(tl.int64), head * G + m % G
        live = (m < GROUP * G) & (b < num)
        token = q + b[:, None] * stride_qb
        if FUSED:
            c, s = cos + b[:, None] * D, sin + b[:, None] * D
            queries = rotated(token, weight, c, s, heads, live, eps, stride_qh, D, BLOCK_D, NORM, True)
        else:
            mask = live[:, None] & (d < D)[None, :]
            queries = tl.load(token + heads[:, None] * stride_qh + d[None, :], mask=mask, other=0.0)
        table = page_table + tl.load(groups + tl.num_programs(0) + group).to(tl.int64) * stride_table
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for at in tl.range(start, length, NUM_SPLITS * BLOCK_N, num_stages=STAGES):
            places = at + tl.arange(0, BLOCK_N)
            pages = tl.load(table + places // P).to(tl.int64)
            keys = load_whole(k, pages, places % P, head, stride_page, stride_token, stride_head, D, BLOCK_D)
            values = load_whole(
                v, pages, places % P, head, of_values(stride_page, D, DV), of_values(stride_token, D, DV),
                of_values(stride_head, D, DV), DV, BLOCK_V,
            )  # fmt: skip
            if SCALED:
                scale_at = pages * stride_scale_page + (places % P) * stride_scale_token + head
                keys, values = unpacked(keys, queries.dtype, E4M3), unpacked(values, queries.dtype, E4M3)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if SCALED:
                scores *= by_unit(tl.load(k_scale + scale_at), E4M3)[None, :]
            if CAP > 0:
                scores = capped(scores * scale, CAP)
                new = tl.maximum(best, tl.max(scores, 1))
                shares = tl.exp2(scores - new[:, None])
            else:
                new = tl.maximum(best, tl.max(scores, 1) * scale)
                shares = tl.exp2(scores * scale - new[:, None])
            shrink = tl.exp2(best - new)
            total = total * shrink + tl.sum(shares, 1)
            if SCALED:
                shares *= by_unit(tl.load(v_scale + scale_at), E4M3)[None, :]
            acc = tl.dot(shares.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
            best = new
        place = (b * HQ + heads) * NUM_SPLITS + split
        tl.store(part + place[:, None] * DV + e[None, :], acc, mask=live[:, None] & (e < DV)[None, :])
        tl.store(part_max + place, best, mask=live)
        tl.store(part_sum + place, total, mask=live)


def rows_per_group(group: int, v_dim: int) -> int:
    """Rows whose queries one program takes, for G query heads per KV head; 0 if that is too many for two rows."""
    most = MAX_QUERIES if v_dim <= 256 else MAX_QUERIES // 2
    rows = min(MAX_ROWS, 1 << (most // group).bit_length() - 1) if group <= most else 0
    return rows if rows > 1 else 0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What a step's decode rows share, in groups of `group` rows.

    `behind` `[B]` int32 is the leading tokens of each row that its group reads for it, 0 for a row that does not share.
    `groups` `[2, N]` int32 is the same by group, with a device row that has these tokens.
    """

    group: int
    behind: Tensor
    groups: Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """Partial results over the shared tokens, by row, head and split: as `DecodeScratch.get` has them."""

    part: Tensor
    part_max: Tensor
    part_sum: Tensor
    splits: int
    block_n: int


class PrefixScratch:
    """Buffers for what is shared and for partial results, allocated on first use and kept: graphs refer to them.

    One buffer for partial results serves batches of every size: they follow one another on one stream.
    """

    def __init__(self, num_qo_heads: int, num_kv_heads: int, v_dim: int, device: torch.device) -> None:
        self._heads, self._kv_heads, self._dim, self._device = num_qo_heads, num_kv_heads, v_dim, device
        self.group = rows_per_group(num_qo_heads // num_kv_heads, v_dim)
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}
        self._parts: dict[int, Tensor] = {}

    def plan(self, batch: ForwardBatch, page_size: int) -> SharedPrefix:
        """Find what the decode rows of a batch share.

        An ordinary launch that is not followed early, and the lookup of the embeddings, another one, comes after it: so
        the model's kernels may load the outcome before they wait (`triton/pdl.py`), as they do lengths and rows.
        """
        num = batch.num_decode
        group = min(self.group, triton.next_power_of_2(num))
        num_groups = triton.cdiv(num, group)
        if num not in self._shared:
            shapes: tuple[tuple[int, ...], ...] = ((num,), (2, num_groups))
            behind, groups = (torch.zeros(shape, dtype=torch.int32, device=self._device) for shape in shapes)
            self._shared[num] = behind, groups
        table, (behind, groups) = batch.page_table, self._shared[num]
        _plan_kernel[(num_groups,)](
            table, batch.rows, batch.seq_lens, batch.kv_slots, behind, groups, num, table.stride(0),
            GROUP=group, P=page_size, TILE=TILE, BLOCK=256 if page_size >= 16 else 512, num_warps=8,
        )  # fmt: skip
        return SharedPrefix(group, behind, groups)

    def parts(self, num: int, num_groups: int, block_n: int) -> Parts:
        """Return room for the partial results of `num` rows."""
        splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(PROGRAMS, num_groups * self._kv_heads)))
        rows = num * self._heads * splits
        # No batch of any size needs more than all programs with all their queries, unless there is but one split.
        room = max(rows, 2 * PROGRAMS * MAX_QUERIES)
        if room not in self._parts:
            self._parts[room] = torch.empty(room * (self._dim + 2), dtype=torch.float32, device=self._device)
        part, part_max, part_sum, _ = self._parts[room].split_with_sizes(
            (rows * self._dim, rows, rows, (room - rows) * (self._dim + 2))
        )
        return Parts(part, part_max, part_sum, splits, block_n)


def attend_prefix(
    q: Tensor,
    kv: Pair,
    layer: AttentionLayer,
    batch: ForwardBatch,
    shared: SharedPrefix,
    scratch: PrefixScratch,
    norm: tuple[Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
    scales: Scales | None,
    *,
    is_fused: bool,
) -> Parts:
    """Attend the decode rows to what their groups share.

    Args:
        q: `[B, Hq, D]`, or the projection `[B, Hq + 2 Hk, D]` if `is_fused`; heads contiguous in D.
        kv: This layer of the pool.
        layer: The layer's facts; no window, and the scale is positive.
        batch: Page table of the rows.
        shared: From `scratch.plan` of the same batch.
        scratch: Where the results go.
        norm: As `decode_qkv`.
        rope: As `decode_qkv`.
        scales: Of the numbers of a pool in 8 bits.
        is_fused: Whether queries are still to be normalised and rotated.

    Returns:
        The partial results. A group that shares nothing has none, and the first `tokens / block_n` splits of others.
    """
    num, hq, hk, d, dv, (k, v) = q.shape[0], layer.num_qo_heads, layer.num_kv_heads, layer.qk_dim, layer.v_dim, kv
    num_groups = shared.groups.shape[1]
    block_m = max(16, triton.next_power_of_2(shared.group * (hq // hk)))
    block_n, warps, stages = choose_tile(block_m, max(d, dv), q.dtype)
    scale_tensors, scale_strides, kinds = scale_arguments(scales, q)
    parts = scratch.parts(num, num_groups, block_n)
    _prefix_kernel[(num_groups, hk, parts.splits)](
        q, k, v, batch.page_table, shared.groups, q if norm is None else norm[0], *rope,
        parts.part, parts.part_max, parts.part_sum, *scale_tensors,
        layer.scale * LOG2E, 0.0 if norm is None else norm[1], num,
        q.stride(0), q.stride(1), batch.page_table.stride(0), *k.stride()[:3], *scale_strides,
        GROUP=shared.group, HQ=hq, HK=hk, BLOCK_M=block_m, D=d, BLOCK_D=block_of_width(d), DV=dv,
        BLOCK_V=block_of_width(dv), P=k.shape[1], BLOCK_N=block_n, NUM_SPLITS=parts.splits, STAGES=stages,
        FUSED=is_fused, NORM=norm is not None, CAP=(layer.soft_cap or 0.0) * LOG2E, num_warps=warps, **kinds,
        **launch_options(q),
    )  # fmt: skip
    return parts


def choose_tile(block_m: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Tokens per tile, warps and stages: the largest that compile without spilling for compute capability 9.0."""
    if dtype.itemsize > 2:
        return (32, 8, 2) if dim <= 64 else (16, 8, 2 if dim <= 128 else 1)
    if dim > 128:
        return 32, 8 if block_m > 32 or dim > 256 else 4, 2
    return 64, 4, 3
