"""Keys, values and latent rows in 8 bits, with one scale for each token and head: how they are written and read.

A head of a token, `D` numbers, is stored as `D` numbers of int8 or float8 (e4m3) and a bfloat16 scale, which the
largest of them decides; it stands for `number * scale`. The numbers are made for the scale as it was rounded. Under
page ids the scales of `k`, `v` and `latent` are the tensors `k_scale`, `v_scale` and `latent_scale`.

T tokens, N pages, P page size, Hk KV heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.contracts.attention import KVPool
from dovetail.contracts.cache import SCALED_DTYPES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in SCALED_DTYPES}
MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each."""


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return numbers `[…, D]` and scales `[…]` in bfloat16 of `x` `[…, D]`; a scale is finite if its numbers were.

    Args:
        x: Heads of tokens.
        dtype: int8 or float8_e4m3fn.
    """
    heads, most = x.float(), MOST[dtype]
    largest = heads.abs().amax(-1)
    scale = (largest / torch.full_like(largest, most)).to(torch.bfloat16)  # CUDA multiplies by a number's inverse
    by = scale.float()
    found = (heads / torch.where(by == 0, torch.ones_like(by), by)[..., None]).clamp(-most, most)
    return (found.round() if dtype == torch.int8 else found).to(dtype), scale


def dequantise(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return `number * scale` in float32, `[…, D]`."""
    return numbers.float() * scale.float()[..., None]


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `x` is after it was cached, in its own dtype."""
    return dequantise(*quantise(x, dtype)).to(x.dtype)


def write_scaled(pool: KVPool, index: int, name: str, slots: Tensor, x: Tensor) -> None:
    """Write `k`, `v` or `latent` of a step's tokens.

    Args:
        pool: The cache.
        index: The layer.
        name: Of the tensor; beside it stands that of its scales.
        slots: `[T]` int64, `page * P + offset`.
        x: `[T, Hk, D]`, or `[T, D]` of latent rows.
    """
    pages, offsets = slots // pool.page_size, slots % pool.page_size
    stored = pool.tensor(index, name)
    numbers, scale = quantise(x, stored.dtype)
    as_bytes(stored)[pages, offsets] = as_bytes(numbers)
    pool.tensor(index, f"{name}_scale")[pages, offsets] = scale


def read_scaled(pool: KVPool, index: int, name: str, pages: Tensor) -> Tensor:
    """Return whole pages of `k`, `v` or `latent` in float32: `[N, P, Hk, D]`, or `[N, P, D]` of latent rows."""
    stored = pool.tensor(index, name)
    numbers = torch.index_select(as_bytes(stored).flatten(1), 0, pages).view(-1, *stored.shape[1:])
    return dequantise(numbers.view(stored.dtype), pool.tensor(index, f"{name}_scale")[pages])


def as_bytes(numbers: Tensor) -> Tensor:
    """Return numbers as int8: torch moves few things in float8."""
    return numbers.view(torch.int8)
