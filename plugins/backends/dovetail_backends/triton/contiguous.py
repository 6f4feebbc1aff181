"""Keys and values of long prompts side by side: copied out of the pages, a layer at a time, for the prefill kernel.

Where a page is looked up for each key, a prompt of 16,384 tokens runs at 384 to 396 TFLOP/s on an H100 and an H200,
over keys side by side at 480 to 500: looking up takes instructions between the matrix products. The copy reads and
writes each key once, the kernel multiplies it by all new tokens.

H heads that are copied at once, L tokens of all requests of a launch, one request after the other; letters otherwise as
in `kv`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.triton.kv import Pair, block_of_width

LONG = 2048
"""New tokens of a request from which its keys are copied: by then a copy takes a tenth of what it saves, at the least.
Made-up steps before the first request are as long (`dovetail.runtime.warm_up`), so that both kernels are compiled."""
COPY_BYTES = 64 << 20
"""What a copy may take, so that a long prefix takes no more memory than a short one: fewer heads are copied at once."""
BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Contiguous:
    """A copy.

    Attributes:
        kv: Keys `[H, L, D]` and values `[H, L, Dv]`.
        starts: `[R]` int64, where the first key of each request stands.
        first_head: The first KV head that was copied.
    """

    kv: Pair
    starts: Tensor
    first_head: int


def is_worth_it(layer: AttentionLayer, batch: ForwardBatch, longest: int, dtype: torch.dtype) -> bool:
    """Whether to copy the keys of a batch's chunks: long ones over all keys, of lengths that the host knows."""
    if longest < LONG or not batch.seq_lens_cpu or dtype.itemsize != 2 or max(layer.qk_dim, layer.v_dim) > 128:
        return False
    if layer.sliding_window is not None or layer.chunk_size is not None:
        return False
    return _bytes_of_head(layer, batch, dtype) <= COPY_BYTES


def _bytes_of_head(layer: AttentionLayer, batch: ForwardBatch, dtype: torch.dtype) -> int:
    return sum(batch.seq_lens_cpu[batch.num_decode :]) * (layer.qk_dim + layer.v_dim) * dtype.itemsize


def copies(kv: Pair, layer: AttentionLayer, batch: ForwardBatch) -> Iterator[Contiguous]:
    """Copy the keys and values that a batch's chunks see, as many heads at once as `COPY_BYTES` has room for.

    A copy is overwritten by the next one.
    """
    k, v = kv
    lengths, table, first = batch.seq_lens_cpu[batch.num_decode :], batch.page_table, batch.num_decode
    total, d, dv = sum(lengths), layer.qk_dim, layer.v_dim
    at_once = min(layer.num_kv_heads, COPY_BYTES // _bytes_of_head(layer, batch, k.dtype))
    ends = torch.cumsum(batch.seq_lens[first:], 0)
    starts = ends - batch.seq_lens[first:]
    keys, values = k.new_empty(at_once, total, d), v.new_empty(at_once, total, dv)
    for head in range(0, layer.num_kv_heads, at_once):
        num = min(at_once, layer.num_kv_heads - head)
        _copy_kernel[(triton.cdiv(max(lengths), BLOCK_TOKENS), len(lengths), num)](
            k, v, keys, values, table, batch.rows, batch.seq_lens, starts, first, head,
            table.stride(0), *k.stride()[:3], *v.stride()[:3], keys.stride(0), values.stride(0),
            D=d, BLOCK_D=block_of_width(d), DV=dv, BLOCK_V=block_of_width(dv), P=k.shape[1], BLOCK=BLOCK_TOKENS,
            **launch_options(k),
        )  # fmt: skip
        yield Contiguous((keys[:num], values[:num]), starts, head)


@triton.jit(do_not_specialize=["first_request", "first_head"])
def _copy_kernel(
    k, v, keys, values, page_table, rows, seq_lens, starts, first_request, first_head,
    stride_table, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_keys, stride_values,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program copies BLOCK tokens of one head of a request."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    number, head = tl.program_id(1), tl.program_id(2)
    request = first_request + number
    length = tl.load(seq_lens + request)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < length
    table = page_table + tl.load(rows + request) * stride_table
    pages = tl.load(table + token // P, mask=inside, other=0).to(tl.int64)[:, None]
    offsets, there = (token % P)[:, None], (tl.load(starts + number) + token)[:, None]
    d, e = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_V)[None, :]
    wanted = inside[:, None] & (d < D)
    found = tl.load(k + pages * stride_kp + offsets * stride_kt + (first_head + head) * stride_kh + d, mask=wanted)
    tl.store(keys + head * stride_keys + there * D + d, found, mask=wanted)
    wanted = inside[:, None] & (e < DV)
    found = tl.load(v + pages * stride_vp + offsets * stride_vt + (first_head + head) * stride_vh + e, mask=wanted)
    tl.store(values + head * stride_values + there * DV + e, found, mask=wanted)
