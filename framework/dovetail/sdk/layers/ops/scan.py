"""The selective scan of Mamba 1 in plain torch: what its kernels must equal.

A channel keeps a state of D numbers, computed in float32. A token with input x, step d, vectors b and c makes of it
`s e^(a d) + b d x`, a at most 0 and of the channel and the number, and reads `s c + k x`, k the skip of the channel,
times the SiLU of a gate. A step is the softplus of a number of the token and a bias. Source: arXiv:2312.00752.

Each number of a state decays by itself, so nothing of a piece is a product of matrices: tokens are folded one by one,
and neither a prompt's cuts nor other requests change a bit. Where states are kept in fewer bits, they are rounded
behind each token.

T tokens, P channels, D numbers of each; B requests, C pieces, S device rows, M copies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.sdk.layers.ops.conv import fold_tokens


def _fold_token(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, gate: Tensor, a_log: Tensor, dt_bias: Tensor, skip: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fold a token of each of n requests into states `[n, P, D]`: what it reads `[n, P]`, and the states."""
    wide, step = x.float(), F.softplus(dt.float() + dt_bias)
    state = state.float() * (-a_log.exp() * step[..., None]).exp()
    state = state + (step * wide)[..., None] * b.float()[:, None]
    read = (state * c.float()[:, None]).sum(-1) + skip * wide
    return (read * F.silu(gate.float())).to(x.dtype), state


def selective_scan_prefill(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
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
        x: `[T, P]`.
        dt: `[T, P]`: steps are made of it.
        b: `[T, D]`.
        c: `[T, D]`.
        gate: `[T, P]`.
        a_log: `[P, D]` float32: a is `-exp` of it.
        dt_bias: `[P]` float32.
        skip: `[P]` float32.
        rows: As for `conv_qkv`, and what follows.
        starts: See there.
        pieces: See there.
        table: See there.
        saves: See there.
        state: `[S, P, D]` float32, bfloat16 or float16.
        copies: `[M, P, D]`, in its dtype.

    Returns:
        `[T, P]`; zeros for tokens that are no request's.
    """

    def fold(one: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        return _fold_token(x[one], dt[one], b[one], c[one], gate[one], a_log, dt_bias, skip, before)

    return fold_tokens(fold, torch.zeros_like(x), rows, table, saves, state, copies)


def selective_scan_decode(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    rows: Tensor,
    state: Tensor,
) -> Tensor:
    """As `selective_scan_prefill`, for a token of each of T requests, in these device rows: `[T, P]`."""
    read, after = _fold_token(x, dt, b, c, gate, a_log, dt_bias, skip, state.index_select(0, rows))
    state.index_copy_(0, rows, after.to(state.dtype))
    return read
