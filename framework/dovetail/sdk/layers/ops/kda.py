"""Kimi Delta Attention in plain torch: what its kernels must equal.

It is Gated DeltaNet (`ops/delta.py`) whose decays are of each number of a key, not of a head. Tokens are folded one by
one, so neither a prompt's cuts nor other requests change a bit. Source: arXiv:2510.26692.

T tokens, G heads; D and W widths of a key and of a value; P = G (2 D + W) channels, of queries, keys, values; K
taps; B requests, C pieces, S device rows, M copies.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dovetail.sdk.layers.ops.conv import conv_token, fold_by_token
from dovetail.sdk.layers.ops.delta import Heads


def _fold_token(
    x: Tensor, b: Tensor, f: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Fold a token of each of n requests into states `[n, G, D, W]`: what it reads `[n, G, W]`, and the states."""
    q, k, v = Heads.of(x, f.shape[1], 1, f.shape[2])
    decay = -a_log.exp()[:, None] * F.softplus(f.float() + dt_bias.view(f.shape[1:]))
    state = state.float() * decay.exp()[..., None]
    change = (v - (state * k[..., None]).sum(-2)) * b.float().sigmoid()[..., None]
    state = state + k[..., None] * change[..., None, :]
    return (state * q[..., None]).sum(-2).to(x.dtype), state


def kda_prefill(
    x: Tensor,
    b: Tensor,
    f: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    rows: Tensor,
    starts: Tensor,
    pieces: Tensor,
    table: Tensor,
    saves: Tensor,
    state: Tensor,
    copies: Tensor,
) -> Tensor:
    """Fold the tokens of requests into their states, one by one.

    Args:
        x: `[T, P]`, what `conv_qkv` returns.
        b: `[T, G]`: rates are its sigmoid.
        f: `[T, G, D]`: decays are made of it.
        a_log: `[G]` float32.
        dt_bias: `[G D]` float32.
        rows: As for `conv_qkv`, and what follows.
        starts: See there.
        pieces: See there.
        table: See there.
        saves: See there.
        state: `[S, G, D, W]` float32, bfloat16 or float16.
        copies: `[M, G, D, W]`, in its dtype.

    Returns:
        What tokens read, `[T, G, W]`; zeros for tokens that are no request's.
    """

    def fold(one: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        return _fold_token(x[one], b[one], f[one], a_log, dt_bias, before)

    return fold_by_token(fold, x.new_zeros(len(x), *state.shape[1::2]), rows, table, saves, state, copies)


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    f: Tensor,
    rows: Tensor,
    positions: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv: Tensor,
    state: Tensor,
) -> Tensor:
    """Fold a token of each request: convolution and fold at once.

    Args:
        q: `[T, G, D]`, the convolution's inputs.
        k: As `q`.
        v: `[T, G, W]`.
        b: As for `kda_prefill`.
        f: See there.
        rows: `[T]` device rows, each once, but for one that pads.
        positions: `[T]` of the tokens.
        weight: `[P, K]`, the convolution's.
        a_log: As for `kda_prefill`.
        dt_bias: See there.
        conv: `[S, K, P]`.
        state: As for `kda_prefill`.

    Returns:
        What tokens read, `[T, G, W]`.
    """
    x = conv_token(q, k, v, weight, None, rows, positions, conv)
    read, after = _fold_token(x, b, f, a_log, dt_bias, state.index_select(0, rows))
    state.index_copy_(0, rows, after.to(state.dtype))
    return read
