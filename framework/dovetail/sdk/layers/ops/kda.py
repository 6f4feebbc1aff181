"""Kimi Delta Attention in plain torch: what its kernels must equal.

It is Gated DeltaNet (`ops/delta.py`) whose decays are of each number of a key, not of a head: a token with decays g
`[D]` makes of a state `S` `[D, W]` what is `diag(e^g) S` there. Pieces and rounding are as there. Exponents are sums of
decays and never differences of such sums, which lose what is small behind what is large. Source: arXiv:2510.26692.

T tokens, G heads; D and W widths of a key and of a value; P = G (2 D + W) channels, of queries, keys, values; K
taps; B requests, C pieces, S device rows, M copies.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.sdk.layers.ops.conv import PIECE, conv_token, fold_tokens
from dovetail.sdk.layers.ops.delta import Heads

BLOCK = 8
"""Tokens of a piece whose products are summed up number by number; those of different blocks are a matmul."""


def _decays(f: Tensor, a_log: Tensor, dt_bias: Tensor, bound: float) -> Tensor:
    """Decays in log space of tokens `[n, G, D]`, at most 0, float32."""
    step, factor = f.float() + dt_bias.view(f.shape[1:]), a_log.exp()[:, None]
    return bound * (factor * step).sigmoid() if bound else -factor * F.softplus(step)


def _fold_token(
    x: Tensor, b: Tensor, f: Tensor, a_log: Tensor, dt_bias: Tensor, bound: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Fold a token of each of n requests into states `[n, G, D, W]`: what it reads `[n, G, W]`, and the states."""
    q, k, v = Heads.of(x, f.shape[1], 1, f.shape[2])
    state = state.float() * _decays(f, a_log, dt_bias, bound).exp()[..., None]
    change = (v - (state * k[..., None]).sum(-2)) * b.float().sigmoid()[..., None]
    state = state + k[..., None] * change[..., None, :]
    return (state * q[..., None]).sum(-2).to(x.dtype), state


def _behind(decay: Tensor) -> Tensor:
    """Sum up, for each of some tokens, the decays of those behind it: `[G, n, D]`."""
    return F.pad(decay[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)


def _passed(decay: Tensor) -> Tensor:
    """Sum up decays from token j to token i of a block, `[G, i, j, D]`: 0 where i is not behind j."""
    lines = [decay.new_zeros(decay.shape)]
    for i in range(1, BLOCK):
        line = lines[-1].clone()
        line[:, :i] += decay[:, i, None]
        lines.append(line)
    return torch.stack(lines, 1)


def _products(left: Tensor, right: Tensor, decay: Tensor) -> Tensor:
    """Multiply rows i `[…, G, 64, D]` by rows j `[G, 64, D]` decayed from j to i; 0 where i is before j."""
    found = left.new_zeros(*left.shape[:-1], PIECE)
    for first in range(0, PIECE, BLOCK):
        own, before = slice(first, first + BLOCK), slice(first)
        near = torch.einsum(
            "...gid,gijd->...gij", left[..., own, :], right[:, None, own] * _passed(decay[:, own]).exp()
        )
        found[..., own, own] = near.tril()
        if first:
            far = (right[:, before] * _behind(decay[:, before]).exp()).mT
            found[..., own, before] = (left[..., own, :] * decay[:, own].cumsum(1).exp()) @ far
    return found


def _fold_piece(heads: Heads, decay: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a whole piece `[G, 64, …]` into states `[G, D, W]`: what it reads `[G, 64, W]`, and the states."""
    q, k, v = heads
    scores, system = _products(torch.stack((q, k)), k, decay)
    from_start, by = decay.cumsum(1).exp(), rate[..., None]
    wanted = by * (v - (k * from_start) @ state)
    changes = torch.linalg.solve_triangular((system * by).tril(-1), wanted, upper=False, unitriangular=True)
    read = (q * from_start) @ state + scores @ changes
    return read, state * from_start[:, -1, :, None] + (k * _behind(decay).exp()).mT @ changes


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
    *,
    bound: float = 0.0,
    by_token: bool = False,
) -> Tensor:
    """Fold the tokens of requests into their states, piece by piece.

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
        bound: What decays are bounded by in log space, below 0 (Ling: -5); 0: by nothing, and made in another way.
        by_token: Fold token by token.

    Returns:
        What tokens read, `[T, G, W]`; zeros for tokens that are no request's.
    """
    num_heads, dim = f.shape[1:]
    out = x.new_zeros(len(x), *state.shape[1::2])

    def token(one: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        return _fold_token(x[one], b[one], f[one], a_log, dt_bias, bound, before)

    def piece(own: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        missing = PIECE - (own.stop - own.start)
        heads = Heads.of(F.pad(x[own], (0, 0, 0, missing)), num_heads, 1, dim)
        by_head = Heads(*(one.transpose(0, 1).contiguous() for one in heads))
        decay = F.pad(_decays(f[own], a_log, dt_bias, bound), (0, 0, 0, 0, 0, missing)).transpose(0, 1).contiguous()
        still = F.pad(b[own].float().sigmoid(), (0, 0, 0, missing)).t()  # no token, no change
        read, after = _fold_piece(by_head, decay, still, before[0].float())
        return read[:, : PIECE - missing].transpose(0, 1), after[None]

    if by_token:
        return fold_tokens(token, out, rows, table, saves, state, copies)
    return fold_tokens(piece, out, rows, table, saves, state, copies, size=PIECE)


kda_prefill_by_token = partial(kda_prefill, by_token=True)
"""As `kda_prefill`, token by token: a decoded one has the bits of one of a prompt, wherever that was cut."""


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
    *,
    bound: float = 0.0,
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
        bound: See there.

    Returns:
        What tokens read, `[T, G, W]`.
    """
    x = conv_token(q, k, v, weight, None, rows, positions, conv)
    read, after = _fold_token(x, b, f, a_log, dt_bias, bound, state.index_select(0, rows))
    state.index_copy_(0, rows, after.to(state.dtype))
    return read
