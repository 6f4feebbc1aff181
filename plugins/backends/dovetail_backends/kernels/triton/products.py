"""Products for CUDA tensors: our Triton kernels where they are faster, else cuBLAS; each equals its `reference`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.sdk.layers.ops import reference
from dovetail_backends.kernels.triton.gemv import gemv
from dovetail_backends.kernels.triton.launch import Tile, shared_bytes
from dovetail_backends.kernels.triton.norms import rms_norm, silu_and_mul
from dovetail_backends.kernels.triton.skinny import GATE_TILES, SHARED_BYTES, TILES, Tiles, skinny, tile_for


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.linear`: our kernels for one row and, at shapes where they are faster, for a few; else cuBLAS."""
    if _is_gemv(x, weight):
        return gemv(x, weight, bias)
    tile = _tile(x, weight, TILES)
    return F.linear(x, weight, bias) if tile is None else skinny(x, weight, bias, tile)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.wide_linear`: one kernel for one row."""
    if _is_gemv(x, weight):
        return gemv(x, weight, bias, dtype=torch.float32)
    return reference.wide_linear(x, weight, bias)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.norm_linear`: one kernel for a few rows."""
    if _is_gemv(x, weight):
        return gemv(x, weight, bias, norm=norm, eps=eps)
    tile = _tile(x, weight, TILES)
    if tile is not None:
        return skinny(x, weight, bias, tile, norm=norm, eps=eps)
    return F.linear(rms_norm(x, norm, eps), weight, bias)


def norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.norm_gate`: one kernel for a few rows."""
    if _is_gemv(x, weight):
        return gemv(x, weight, bias, norm=norm, eps=eps, gate=True)
    tile = _tile(x, weight, GATE_TILES)
    if tile is not None:
        return skinny(x, weight, bias, tile, norm=norm, eps=eps, gate=True)
    return silu_and_mul(F.linear(rms_norm(x, norm, eps), weight, bias))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """See `reference.linear_add`: one kernel; cuBLAS adds in place."""
    if _is_gemv(x, weight):
        return gemv(x, weight, bias, residual=residual)
    tile = _tile(x, weight, TILES)
    if tile is not None:
        return skinny(x, weight, bias, tile, residual=residual)
    total = residual.addmm_(x, weight.t())
    return total if bias is None else total.add_(bias)


def _is_gemv(x: Tensor, weight: Tensor) -> bool:
    return x.shape[0] == 1 and x.stride(-1) == 1 and weight.is_contiguous()


def _tile(x: Tensor, weight: Tensor, tiles: Tiles) -> tuple[int, Tile] | None:
    if x.dtype != torch.bfloat16 or x.stride(-1) != 1 or not weight.is_contiguous():
        return None
    tile = tile_for(x.shape[0], weight, tiles)
    return tile if tile is not None and shared_bytes(x.device) >= SHARED_BYTES else None
