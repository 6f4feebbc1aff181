"""Gated DeltaNet in plain torch: what its kernels must equal.

A head keeps a state `S` `[D, W]`, computed in float32. A token with query q, key k, value v, decay g (log space, at
most 0) and rate b makes of it `S e^g + k (b (v - k S e^g))`, and reads `q S`. Source: arXiv:2412.06464. Queries, keys
and values come through a short convolution over time (`ops/conv.py`).

Prompts are folded in pieces of 64 tokens, counted from the beginning of a request. A piece is one fixed computation,
whatever stands beside it, so a state at the end of a piece does not tell where a prompt was cut. Where states are kept
in fewer bits, they are rounded there, or by the functions that go token by token behind each token.

T tokens, G key heads, each with J value heads, N = G J; D and W widths of a key and of a value head; P = 2 G D + N W
channels, those of queries, of keys, of values; K taps; B requests, C pieces, S device rows, M copies.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.sdk.layers.ops.conv import PIECE, conv_token, fold_tokens, one_by_one

EPS = 1e-6
"""Of the norm of queries and keys; transformers has it so."""


class Gates(NamedTuple):
    """Of each value head: decay in log space, and rate. Float32."""

    decay: Tensor
    rate: Tensor

    @classmethod
    def of(cls, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, most: float) -> Gates:
        """Make them of `[…, G, J]`: `[…, N]`; rates are at most `most`."""
        step = F.softplus(a.flatten(-2).float() + dt_bias.float())
        return cls(-a_log.float().exp() * step, b.flatten(-2).float().sigmoid() * most)


class Heads(NamedTuple):
    """Queries and keys of length 1, each key head's for all of its value heads, `[…, N, D]`; values `[…, N, W]`."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, x: Tensor, num_keys: int, per_key: int, dim: int) -> Heads:
        """Make them of what is convolved, `[…, P]`."""
        values, heads = x.shape[-1] - 2 * num_keys * dim, num_keys * per_key
        widths = [num_keys * dim, num_keys * dim, values]
        q, k, v = torch.split(x.float(), widths, -1)
        tokens = x.shape[:-1]
        q, k = (_unit(one.reshape(*tokens, num_keys, dim)).repeat_interleave(per_key, -2) for one in (q, k))
        return cls(q * dim**-0.5, k, v.reshape(*tokens, heads, values // heads))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def _fold_token(heads: Heads, gates: Gates, state: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a token of each of n requests into states `[n, N, D, W]`: what it reads `[n, N, W]`, and the states."""
    state = state * gates.decay.exp()[..., None, None]
    found = (state * heads.k[..., None]).sum(-2)
    change = (heads.v - found) * gates.rate[..., None]
    state = state + heads.k[..., None] * change[..., None, :]
    return (state * heads.q[..., None]).sum(-2), state


def _fold_piece(heads: Heads, gates: Gates, state: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a whole piece `[N, 64, …]` into states `[N, D, W]`: what it reads `[N, 64, W]`, and the states.

    The changes of a piece's tokens depend on one another: they solve a triangular system.
    """
    q, k, v = heads
    total = gates.decay.cumsum(-1)
    since = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    rate, from_start = gates.rate[..., None], total.exp()[..., None]
    system = (k @ k.mT * since * rate).tril(-1)
    wanted = rate * (v - from_start * (k @ state))
    changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    read = from_start * (q @ state) + (q @ k.mT * since) @ changes
    to_end = (total[..., -1:] - total).exp()[..., None]
    return read, state * total[..., -1].exp()[..., None, None] + (k * to_end).mT @ changes


def gdn_prefill(
    x: Tensor,
    b: Tensor,
    a: Tensor,
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
    rate: float = 1.0,
    by_token: bool = False,
) -> Tensor:
    """Fold the tokens of requests into their states, piece by piece.

    Args:
        x: `[T, P]`, what `conv_qkv` returns.
        b: `[T, G, J]`: rates are its sigmoid.
        a: `[T, G, J]`: decays are made of it.
        a_log: `[N]` float32.
        dt_bias: `[N]` float32.
        rows: As for `conv_qkv`, and what follows.
        starts: See there.
        pieces: See there.
        table: See there.
        saves: See there.
        state: `[S, N, D, W]` float32, bfloat16 or float16.
        copies: `[M, N, D, W]`, in its dtype.
        rate: Largest rate; above 1, a token may turn what the state holds of its key around (OLMo Hybrid: 2).
        by_token: Fold token by token.

    Returns:
        What tokens read, `[T, N, W]` in the dtype of `x`; zeros for tokens that are no request's.
    """
    num_keys, per_key = b.shape[1:]
    out = x.new_zeros(len(x), *state.shape[1::2])

    def token(one: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        heads = Heads.of(x[one], num_keys, per_key, state.shape[2])
        return _fold_token(heads, Gates.of(b[one], a[one], a_log, dt_bias, rate), before.float())

    def piece(own: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        missing = PIECE - (own.stop - own.start)
        heads = Heads.of(F.pad(x[own], (0, 0, 0, missing)), num_keys, per_key, state.shape[2])
        gates = Gates.of(b[own], a[own], a_log, dt_bias, rate)
        still = Gates(*(F.pad(one, (0, 0, 0, missing)).t() for one in gates))
        by_head = Heads(*(one.transpose(0, 1).contiguous() for one in heads))
        read, after = _fold_piece(by_head, still, before[0].float())
        return read[:, : PIECE - missing].transpose(0, 1), after[None]

    if by_token:
        return fold_tokens(token, out, rows, table, saves, state, copies)
    return fold_tokens(piece, out, rows, table, saves, state, copies, size=PIECE)


gdn_prefill_by_token = partial(gdn_prefill, by_token=True)
"""As `gdn_prefill`, token by token: a decoded one has the bits of one of a prompt, wherever that was cut."""


def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    rows: Tensor,
    positions: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    conv: Tensor,
    state: Tensor,
    *,
    rate: float = 1.0,
) -> Tensor:
    """Fold a token of each request: convolution, fold and gated norm at once.

    Args:
        q: `[T, G, D]`, the convolution's inputs.
        k: As `q`.
        v: `[T, G, J W]`.
        z: `[T, G, J W]`, what the norm is gated by.
        b: `[T, G, J]`, and what follows as for `gdn_prefill`.
        a: See there.
        rows: `[T]` device rows, each once, but for one that pads.
        positions: `[T]` of the tokens.
        weight: `[P, K]`, the convolution's.
        a_log: As for `gdn_prefill`.
        dt_bias: See there.
        norm: `[W]`.
        eps: Of the norm.
        conv: `[S, K, P]`.
        state: As for `gdn_prefill`.
        rate: See there.

    Returns:
        `[T, N W]`.
    """
    x = conv_token(q, k, v, weight, None, rows, positions, conv)
    num_keys, per_key = b.shape[1:]
    heads = Heads.of(x, num_keys, per_key, state.shape[2])
    gates = Gates.of(b, a, a_log, dt_bias, rate)
    read, after = _fold_token(heads, gates, state.index_select(0, rows).float())
    state.index_copy_(0, rows, after.to(state.dtype))
    return gated_rms_norm(read.to(x.dtype), z.reshape(read.shape), norm, eps)


GateAct = Literal["silu", "sigmoid"]
"""What is made of a gate."""


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, act: GateAct = "silu") -> Tensor:
    """RMS norm of each head, times the SiLU or the sigmoid of a gate: `[T, N, W]` to `[T, N W]`.

    Args:
        x: `[T, N, W]`.
        gate: `[T, N, W]`.
        weight: `[W]`.
        eps: Of the norm.
        act: Of the gate.
    """
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    by = F.silu(gate.float()) if act == "silu" else gate.float().sigmoid()
    return ((weight * normed).float() * by).to(x.dtype).flatten(1)


gated_rms_norm_by_token = one_by_one(gated_rms_norm)
"""As `gated_rms_norm`, each token by itself."""


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)` of heads `[T, N, D]`, as `[T, N D]`."""
    return (x * gate.sigmoid()).flatten(1)
