"""Writes a step's keys and values, or its latent rows, to their slots in the paged pool, one program per token.

T tokens, Hk KV heads, D head dim, P page size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.layers.ops.pdl import launch_options


@triton.jit
def _write_kernel(
    k, v, kv, slots, stride_k, stride_v, stride_page, stride_half, stride_token,
    P: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    target = kv + slot // P * stride_page + slot % P * stride_token + at
    tl.store(target, tl.load(k + token * stride_k + at, mask=inside), mask=inside)
    if VALUES:
        tl.store(target + stride_half, tl.load(v + token * stride_v + at, mask=inside), mask=inside)


def write_rows(x: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write latent rows `[T, 1, D]` (contiguous in D) into `cache` `[N, P, D]`; slots as for `write_kv`."""
    width = x.shape[-1]
    _write_kernel[(x.shape[0],)](
        x, x, cache, slots, x.stride(0), 0, cache.stride(0), 0, cache.stride(1),
        P=cache.shape[1], WIDTH=width, BLOCK=triton.next_power_of_2(width), VALUES=False, num_warps=4,
        **launch_options(x),
    )  # fmt: skip


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Write `k`, `v` `[T, Hk, D]` (rows may be strided, heads contiguous) into `kv` `[N, 2, P, Hk, D]`.

    Args:
        k: Keys.
        v: Values.
        kv: One layer of the pool.
        slots: `[T]` int64, `page * P + offset`; a token with a negative one is not written.
    """
    width = k.shape[1] * k.shape[2]
    _write_kernel[(k.shape[0],)](
        k, v, kv, slots, k.stride(0), v.stride(0), kv.stride(0), kv.stride(1), kv.stride(2),
        P=kv.shape[2], WIDTH=width, BLOCK=triton.next_power_of_2(width), VALUES=True, num_warps=4, **launch_options(k),
    )  # fmt: skip
