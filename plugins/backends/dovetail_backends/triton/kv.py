"""Writes a step's keys and values, or its latent rows, to their slots in the paged pool, one program per token.

T tokens, Hk KV heads, D and Dv widths of keys and values, P page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.contracts.attention import KVPool
from dovetail_backends.kernels.triton.pdl import launch_options
from dovetail_backends.triton.eight_bits import quantised

Pair = tuple[Tensor, Tensor]
"""Keys `[N, P, Hk, D]` and values `[N, P, Hk, Dv]` of one layer's cache, as `KVPool.tensor` has them.

Strides of values are those of keys, times `Dv / D`: both stand side by side, or each is contiguous.
"""


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of one layer's cache in 8 bits, bfloat16.

    Attributes:
        k: Of keys, `[N, P, Hk]`, or of latent rows, `[N, P]`.
        v: Of values, laid out alike; of latent rows the same tensor.
        dtype: Of the numbers, which kernels get as int8.
    """

    k: Tensor
    v: Tensor
    dtype: torch.dtype


def scales_of(pool: KVPool, index: int, *, is_latent: bool) -> Scales:
    """Return the scales of a layer."""
    names = ("latent_scale", "latent_scale") if is_latent else ("k_scale", "v_scale")
    k, v = (pool.tensor(index, name) for name in names)
    return Scales(k, v, pool.tensor(index, "latent" if is_latent else "k").dtype)


def scale_arguments(scales: Scales | None, q: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int], dict[str, bool]]:
    """Return what kernels take of scales: two tensors, strides of page and token, constants; any tensor for none."""
    if scales is None:
        return (q, q), (0, 0), {"SCALED": False, "E4M3": False}
    strides = scales.k.stride(0), scales.k.stride(1)
    return (scales.k, scales.v), strides, {"SCALED": True, "E4M3": scales.dtype == torch.float8_e4m3fn}


def block_of_width(width: int) -> int:
    """Numbers of a head that kernels load, of which matrix instructions need 16."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def _write_kernel(
    k, v, k_cache, v_cache, slots, stride_k, stride_v, stride_page, stride_token, stride_v_page, stride_v_token,
    P: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All heads of a token; without V_WIDTH it has no values."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    target = k_cache + slot // P * stride_page + slot % P * stride_token + at
    tl.store(target, tl.load(k + token * stride_k + at, mask=inside), mask=inside)
    if V_WIDTH > 0:
        v_at = tl.arange(0, V_BLOCK)
        v_inside = v_at < V_WIDTH
        v_target = v_cache + slot // P * stride_v_page + slot % P * stride_v_token + v_at
        tl.store(v_target, tl.load(v + token * stride_v + v_at, mask=v_inside), mask=v_inside)


def write_rows(x: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write latent rows `[T, 1, D]` (contiguous in D) into `cache` `[N, P, D]`; slots as for `write_kv`."""
    width = x.shape[-1]
    _write_kernel[(x.shape[0],)](
        x, x, cache, cache, slots, x.stride(0), 0, cache.stride(0), cache.stride(1), 0, 0,
        P=cache.shape[1], WIDTH=width, BLOCK=triton.next_power_of_2(width), V_WIDTH=0, V_BLOCK=1, num_warps=4,
        **launch_options(x),
    )  # fmt: skip


def write_kv(k: Tensor, v: Tensor, kv: Pair, slots: Tensor) -> None:
    """Write `k` `[T, Hk, D]` and `v` `[T, Hk, Dv]` (rows may be strided, heads contiguous) into `kv`.

    Args:
        k: Keys.
        v: Values.
        kv: One layer of the pool.
        slots: `[T]` int64, `page * P + offset`; a token with a negative one is not written.
    """
    (keys, values), width, v_width = kv, k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]
    _write_kernel[(k.shape[0],)](
        k, v, keys, values, slots, k.stride(0), v.stride(0), *keys.stride()[:2], *values.stride()[:2],
        P=keys.shape[1], WIDTH=width, BLOCK=triton.next_power_of_2(width), V_WIDTH=v_width,
        V_BLOCK=triton.next_power_of_2(v_width), num_warps=4, **launch_options(k),
    )  # fmt: skip


@triton.jit
def _write_scaled_kernel(
    k, v, k_cache, v_cache, k_scale, v_scale, slots, stride_k, stride_v, stride_head, stride_v_head,
    stride_page, stride_token, stride_v_page, stride_v_token, stride_scale_page, stride_scale_token,
    P: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, E4M3: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (token, 2): its keys and its values, or (token, 1): its latent row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    width = tl.where(half == 1, DV, D)
    inside = (head < HEADS)[:, None] & (d < width)[None, :]
    source, scales = k + token * stride_k + head[:, None] * stride_head, k_scale
    target = k_cache + slot // P * stride_page + slot % P * stride_token
    if half == 1:
        source, scales = v + token * stride_v + head[:, None] * stride_v_head, v_scale
        target = v_cache + slot // P * stride_v_page + slot % P * stride_v_token
    x = tl.load(source + d[None, :], mask=inside, other=0.0)
    numbers, scale = quantised(x, E4M3)
    tl.store(target + head[:, None] * width + d[None, :], numbers, mask=inside)
    scale_at = scales + slot // P * stride_scale_page + slot % P * stride_scale_token
    tl.store(scale_at + head, scale, mask=head < HEADS)


def write_scaled_kv(k: Tensor, v: Tensor, kv: Pair, scales: Scales, slots: Tensor) -> None:
    """Write `k`, `v` as `write_kv` does, in 8 bits: `kv` is int8."""
    (keys, values), (num, heads, d), dv = kv, k.shape, v.shape[2]
    _write_scaled_kernel[(num, 2)](
        k, v, keys, values, scales.k, scales.v, slots, k.stride(0), v.stride(0), k.stride(1), v.stride(1),
        *keys.stride()[:2], *values.stride()[:2], scales.k.stride(0), scales.k.stride(1),
        P=keys.shape[1], HEADS=heads, BLOCK_H=triton.next_power_of_2(heads), D=d, DV=dv,
        BLOCK_D=triton.next_power_of_2(max(d, dv)), E4M3=scales.dtype == torch.float8_e4m3fn, num_warps=4,
        **launch_options(k),
    )  # fmt: skip


def write_scaled_rows(x: Tensor, cache: Tensor, scales: Scales, slots: Tensor) -> None:
    """Write latent rows as `write_rows` does, in 8 bits: `cache` int8 `[N, P, D]`."""
    num, d = x.shape[0], x.shape[-1]
    _write_scaled_kernel[(num, 1)](
        x, x, cache, cache, scales.k, scales.k, slots, x.stride(0), 0, 0, 0,
        cache.stride(0), cache.stride(1), 0, 0, scales.k.stride(0), scales.k.stride(1),
        P=cache.shape[1], HEADS=1, BLOCK_H=1, D=d, DV=d, BLOCK_D=triton.next_power_of_2(d),
        E4M3=scales.dtype == torch.float8_e4m3fn, num_warps=4, **launch_options(x),
    )  # fmt: skip
