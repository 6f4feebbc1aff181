"""Mamba 2 (state space duality) in plain torch: what its kernels must equal.

A head keeps a state `S` `[D, W]`, computed in float32. A token with query q (C of the paper), key k (B), value v (x)
and step d makes of it `S e^(a d) + k (d v)`, a at most 0, and reads `q S + s v`, s the skip of the head. A step is the
softplus of a number of the token and a bias, bounded to a range. Source: arXiv:2405.21060. Queries, keys and values
come through a short convolution over time (`ops/conv.py`).

Prompts are folded in pieces of 64 tokens, counted from the beginning of a request, one after the other. A piece is one
fixed computation, whatever stands beside it, so a state at the end of a piece does not tell where a prompt was cut.
Where states are kept in fewer bits, they are rounded there; in `ssd_prefill_by_token` behind each token.

T tokens, G groups, each with a key, a query and J heads, N = G J; D and W widths of a key and of a head; K taps and P
channels of the convolution (2 G D + N W: queries, keys, values); B requests, C pieces, S device rows, M copies.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.sdk.layers.ops.conv import PIECE, conv_token, fold_tokens, one_by_one


class FoldInputs(NamedTuple):
    """What a fold takes of tokens: queries and keys, each group's for all of its heads, values, steps; float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    step: Tensor

    @classmethod
    def of(cls, x: Tensor, dt: Tensor, dt_bias: Tensor, low: float, high: float, dim: int) -> FoldInputs:
        """Make them of what is convolved, `[T, P]`, and `[T, G, J]`: `[T, N, D]` twice, `[T, N, W]`, `[T, N]`."""
        groups, per_group = dt.shape[1:]
        heads = groups * per_group
        q, k, v = torch.split(x.float(), [groups * dim, groups * dim, x.shape[1] - 2 * groups * dim], 1)
        q, k = (one.reshape(len(x), groups, dim).repeat_interleave(per_group, 1) for one in (q, k))
        step = F.softplus(dt.flatten(1).float() + dt_bias).clamp(low, high)
        return cls(q, k, v.reshape(len(x), heads, v.shape[1] // heads), step)


def _fold_token(tokens: FoldInputs, a_log: Tensor, skip: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a token of each of n requests into states `[n, N, D, W]`: what it reads `[n, N, W]`, and the states."""
    q, k, v, step = tokens
    state = state * (-a_log.exp() * step).exp()[..., None, None]
    state = state + k[..., None] * (v * step[..., None])[..., None, :]
    return (state * q[..., None]).sum(-2) + skip[:, None] * v, state


def _fold_piece(tokens: FoldInputs, a_log: Tensor, skip: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a whole piece `[N, 64, …]` into states `[N, D, W]`: what it reads `[N, 64, W]`, and the states."""
    q, k, v, step = tokens
    total = (-a_log.exp()[:, None] * step).cumsum(-1)
    since = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    read = total.exp()[..., None] * (q @ state) + (q @ k.mT * since * step[..., None, :]) @ v
    to_end = (total[..., -1:] - total).exp() * step
    after = state * total[..., -1].exp()[..., None, None] + (k * to_end[..., None]).mT @ v
    return read + skip[:, None, None] * v, after


def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    low: float,
    high: float,
    rows: Tensor,
    starts: Tensor,
    pieces: Tensor,
    table: Tensor,
    saves: Tensor,
    state: Tensor,
    copies: Tensor,
    *,
    by_token: bool = False,
) -> Tensor:
    """Fold the tokens of requests into their states, piece by piece.

    Args:
        x: `[T, P]`, what `conv_qkv` returns.
        dt: `[T, G, J]`: steps are made of it.
        a_log: `[N]` float32: a is `-exp` of it.
        dt_bias: `[N]` float32.
        skip: `[N]` float32.
        low: A step is at least that.
        high: It is at most that.
        rows: As for `conv_qkv`, and what follows.
        starts: See there.
        pieces: See there.
        table: See there.
        saves: See there.
        state: `[S, N, D, W]` float32, bfloat16 or float16.
        copies: `[M, N, D, W]`, in its dtype.
        by_token: Fold token by token.

    Returns:
        What tokens read, `[T, N, W]` in the dtype of `x`; zeros for tokens that are no request's.
    """
    out = x.new_zeros(len(x), *state.shape[1::2])

    def token(one: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        found = FoldInputs.of(x[one], dt[one], dt_bias, low, high, state.shape[2])
        return _fold_token(found, a_log, skip, before.float())

    def piece(own: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        missing = PIECE - (own.stop - own.start)
        found = FoldInputs.of(x[own], dt[own], dt_bias, low, high, state.shape[2])
        padded = (F.pad(one, (0, 0) * (one.dim() - 1) + (0, missing)) for one in found)  # no step, no change
        by_head = FoldInputs(*(one.transpose(0, 1).contiguous() for one in padded))
        read, after = _fold_piece(by_head, a_log, skip, before[0].float())
        return read[:, : PIECE - missing].transpose(0, 1), after[None]

    if by_token:
        return fold_tokens(token, out, rows, table, saves, state, copies)
    return fold_tokens(piece, out, rows, table, saves, state, copies, size=PIECE)


ssd_prefill_by_token = partial(ssd_prefill, by_token=True)
"""As `ssd_prefill`, token by token: a decoded one has the bits of one of a prompt, wherever that was cut."""


def ssd_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    rows: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    low: float,
    high: float,
    conv: Tensor,
    state: Tensor,
) -> Tensor:
    """Fold a token of each request: convolution and fold at once.

    Args:
        q: `[T, G, D]`, the convolution's inputs.
        k: As `q`.
        v: `[T, G, J W]`.
        dt: `[T, G, J]`, as for `ssd_prefill`.
        rows: `[T]` device rows, each once, but for one that pads.
        positions: `[T]` of the tokens.
        weight: `[P, K]`, the convolution's.
        bias: `[P]`.
        a_log: As for `ssd_prefill`.
        dt_bias: See there.
        skip: See there.
        low: See there.
        high: See there.
        conv: `[S, K, P]`.
        state: As for `ssd_prefill`.

    Returns:
        What tokens read, `[T, N, W]`.
    """
    x = conv_token(q, k, v, weight, bias, rows, positions, conv)
    found = FoldInputs.of(x, dt, dt_bias, low, high, state.shape[2])
    read, after = _fold_token(found, a_log, skip, state.index_select(0, rows).float())
    state.index_copy_(0, rows, after.to(state.dtype))
    return read.to(x.dtype)


def gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, norm_first: bool) -> Tensor:
    """RMS norm of each group, of `x` times the SiLU of a gate: `[T, N, W]` to `[T, N W]`.

    Args:
        x: `[T, N, W]`, N groups.
        gate: `[T, N, W]`.
        weight: `[N, W]`; None: nothing is normalised.
        eps: Of the norm.
        norm_first: What is normalised is `x`, which is multiplied by the gate behind that.
    """
    wide, by = x.float(), F.silu(gate.float())
    if weight is None:
        return (wide * by).to(x.dtype).flatten(1)
    wide = wide if norm_first else wide * by
    normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return ((normed.float() * by).to(x.dtype) if norm_first else normed).flatten(1)


gated_group_norm_by_token = one_by_one(gated_group_norm)
"""As `gated_group_norm`, each token by itself."""
