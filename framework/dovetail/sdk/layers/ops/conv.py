"""A short convolution over time in plain torch, for layers that fold tokens into states: what its kernels must equal.

It keeps its last K inputs as a ring: that of the token at position p stands at p mod K. So one program may write the
newest input while others still read those before it.

T tokens, G key heads, each with J value heads; D and W widths of a key and of a value head; P = 2 G D + G J W channels,
those of queries, of keys, of values; K taps; B requests, C pieces, S device rows, M copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ConvAct = Literal["none", "silu"]
"""What follows a short convolution."""
PIECE = 64
"""Tokens of a piece."""


class Piece(NamedTuple):
    """A piece on the host: its request, its first token in the batch, how many it has, and where the copy goes."""

    request: int
    first: int
    num: int
    copy: int


def pieces_of(table: Tensor, saves: Tensor) -> Iterator[Piece]:
    """Yield the pieces of a step, each request's in order."""
    for (request, first, num), copy in zip(table.tolist(), saves.tolist(), strict=True):
        if num > 0:
            yield Piece(request, first, num, copy)


def fold_tokens(
    fold: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
    out: Tensor,
    rows: Tensor,
    table: Tensor,
    saves: Tensor,
    state: Tensor,
    copies: Tensor,
    *,
    size: int = 1,
) -> Tensor:
    """Fold the tokens of requests into their states: one by one, so that no cut or neighbour changes a bit, or more.

    Args:
        fold: Takes `size` tokens of the batch at most, as a slice, and the state before them, `[1, …]` in the dtype of
            `state`. Returns what the tokens read, `[tokens, …]`, and the state behind them, `[1, …]`.
        out: `[T, …]`, is written.
        rows: As for `conv_qkv`, and what follows.
        table: See there.
        saves: See there.
        state: `[S, …]`, is written.
        copies: `[M, …]`, are written.
        size: Tokens that are folded at once; `PIECE` for whole pieces.

    Returns:
        `out`.
    """
    at = rows.tolist()
    for request, first, num, copy in pieces_of(table, saves):
        own = state[at[request]][None]
        for begin in range(first, first + num, size):
            some = slice(begin, min(begin + size, first + num))
            read, after = fold(some, own)
            out[some], own = read.to(out.dtype), after.to(state.dtype)
        state[at[request]] = own[0]
        if copy >= 0:
            copies[copy] = own[0]
    return out


def one_by_one(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a gated norm of `x` and `gate`, both `[T, …]`, that is computed for each token by itself."""

    def by_token(x: Tensor, gate: Tensor, *rest: Any, **options: Any) -> Tensor:
        rows = [norm(x[at : at + 1], gate[at : at + 1].contiguous(), *rest, **options) for at in range(len(x))]
        return torch.cat(rows) if rows else norm(x, gate, *rest, **options)

    return by_token


def _taps(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve `[…, K, P]`, oldest first, with `[P, K]`; rounded where transformers rounds."""
    total = (window.float() * weight.t().float()).sum(-2)
    return (total if bias is None else total + bias.float()).to(window.dtype)


def _activated(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `_taps`, then SiLU."""
    return F.silu(_taps(window, weight, bias))


_TAPS: dict[ConvAct, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {"none": _taps, "silu": _activated}


def conv_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lens: Tensor,
    rows: Tensor,
    starts: Tensor,
    pieces: Tensor,
    table: Tensor,
    saves: Tensor,
    conv: Tensor,
    copies: Tensor,
    *,
    size: int = PIECE,
) -> Tensor:
    """Convolve the tokens of requests over time, with SiLU; their last K inputs are kept.

    Args:
        q: `[T, G, D]`, the convolution's inputs.
        k: As `q`.
        v: `[T, G, J W]`.
        weight: `[P, K]`.
        bias: `[P]`.
        lens: `[B]` tokens of each request once those of the step are in.
        rows: `[B]` device rows.
        starts: `[B + 1]` first token of each request; the last is the end.
        pieces: `[B + 1]` first piece of each request.
        table: `[C, 3]` request, first token and number of tokens of each piece; what pads it has none.
        saves: `[C]` which copy to take behind each piece; -1: none.
        conv: `[S, K, P]`, the rings.
        copies: `[M, K, P]`, copies of them.
        size: Tokens that are computed at once.

    Returns:
        `[T, P]`; that of tokens which are no request's means nothing.
    """
    x = torch.cat([one.flatten(1) for one in (q, k, v)], 1)
    return _convolve(_activated, x, weight, bias, lens, rows, starts, table, saves, conv, copies, size)


conv_qkv_by_token = partial(conv_qkv, size=1)
"""As `conv_qkv`, each token by itself: a decoded one has the bits of one of a prompt."""


def _convolve(
    taps: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lens: Tensor,
    rows: Tensor,
    starts: Tensor,
    table: Tensor,
    saves: Tensor,
    conv: Tensor,
    copies: Tensor,
    size: int,
) -> Tensor:
    """Convolve `[T, P]` by `taps`, computed for so many tokens at a time; rings and copies are written."""
    width = conv.shape[1]
    out, at_rows, ends, at = torch.zeros_like(x), rows.tolist(), lens.tolist(), starts.tolist()
    for request, first, num, copy in pieces_of(table, saves):
        row, end = at_rows[request], at[request + 1]
        position = ends[request] - (end - first)  # of the piece's first token
        ring = torch.arange(position - width, position, device=x.device) % width
        before = conv[row, ring]
        inputs = torch.cat((before, x[first : first + num]))
        for begin in range(0, num, size):
            wide = F.pad(inputs[begin + 1 :][: size + width - 1], (0, 0, 0, max(0, begin + size - num)))
            done, here = taps(wide.unfold(0, width, 1).transpose(1, 2), weight, bias), min(size, num - begin)
            out[first + begin : first + begin + here] = done[:here]
        last, slots = inputs[-width:], torch.arange(position + num - width, position + num, device=x.device) % width
        conv[row, slots] = last
        if copy >= 0:
            copies[copy, slots] = last
    return out


def conv_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    positions: Tensor,
    conv: Tensor,
) -> Tensor:
    """Convolve a token of each of T requests, as `conv_qkv` does: `[T, P]`."""
    x = torch.cat([one.flatten(1) for one in (q, k, v)], 1)
    return _activated(_window(x, rows, positions, conv), weight, bias)


def _window(x: Tensor, rows: Tensor, positions: Tensor, conv: Tensor) -> Tensor:
    """Write inputs `[T, P]` into rings, and return what is convolved for them, `[T, K, P]`."""
    taps = conv.shape[1]
    conv[rows, positions % taps] = x
    order = (positions[:, None] + torch.arange(1 - taps, 1, device=x.device)) % taps
    return conv.index_select(0, rows).gather(1, order[:, :, None].expand(-1, -1, x.shape[1]))


def short_conv_prefill(
    x: Tensor,
    before: Tensor | None,
    behind: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    lens: Tensor,
    rows: Tensor,
    starts: Tensor,
    pieces: Tensor,
    table: Tensor,
    saves: Tensor,
    conv: Tensor,
    copies: Tensor,
    *,
    act: ConvAct,
    size: int = PIECE,
) -> Tensor:
    """Convolve over time what tokens of requests have, between two gates (LFM2) or with SiLU (Mamba 1).

    Args:
        x: `[T, P]`.
        before: `[T, P]`, multiplies `x`; rings keep the product. None: nothing does.
        behind: `[T, P]`, multiplies what is convolved. None: nothing does.
        weight: As for `conv_qkv`, and what follows.
        bias: See there.
        lens: See there.
        rows: See there.
        starts: See there.
        pieces: See there.
        table: See there.
        saves: See there.
        conv: See there.
        copies: See there.
        act: Of what is convolved.
        size: Tokens that are computed at once.

    Returns:
        `[T, P]`; that of tokens which are no request's means nothing.
    """
    given = x if before is None else x * before
    found = _convolve(_TAPS[act], given, weight, bias, lens, rows, starts, table, saves, conv, copies, size)
    return found if behind is None else found * behind


short_conv_prefill_by_token = partial(short_conv_prefill, size=1)
"""As `short_conv_prefill`, each token by itself: a decoded one has the bits of one of a prompt."""


def short_conv_decode(
    x: Tensor,
    before: Tensor | None,
    behind: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    positions: Tensor,
    conv: Tensor,
    *,
    act: ConvAct,
) -> Tensor:
    """As `short_conv_prefill`, for a token of each of T requests, in these device rows: `[T, P]`."""
    given = x if before is None else x * before
    found = _TAPS[act](_window(given, rows, positions, conv), weight, bias)
    return found if behind is None else found * behind
