"""Writes a step's keys and values, or its latent rows, to their slots in the paged pool, one program per token.

T tokens, Hk KV heads, D head dim, P page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.cache.quantized import as_bytes, quantise
from dovetail.contracts.attention import KVPool
from dovetail.layers.ops.pdl import launch_options


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


def write_scaled_kv(k: Tensor, v: Tensor, kv: Tensor, scales: Scales, slots: Tensor) -> None:
    """Write `k`, `v` as `write_kv` does, in 8 bits: `kv` int8 `[N, 2, P, Hk, D]`."""
    (numbers, scale), (value_numbers, value_scale) = quantise(k, scales.dtype), quantise(v, scales.dtype)
    write_kv(as_bytes(numbers), as_bytes(value_numbers), kv, slots)
    write_rows(scale[:, None], scales.k, slots)
    write_rows(value_scale[:, None], scales.v, slots)


def write_scaled_rows(x: Tensor, cache: Tensor, scales: Scales, slots: Tensor) -> None:
    """Write latent rows as `write_rows` does, in 8 bits: `cache` int8 `[N, P, D]`."""
    numbers, scale = quantise(x, scales.dtype)
    write_rows(as_bytes(numbers), cache, slots)
    write_rows(scale[:, :, None], scales.k[..., None], slots)
