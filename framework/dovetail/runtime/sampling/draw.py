"""Draws tokens from logits with temperature, top-k, top-p and min-p: tensors in, tensors out, fit for a graph.

R rows, V vocabulary size, K candidates. A row draws by the exponential race: the token with the largest
`logit / temperature - log(e)` wins, `e` being a unit exponential of (seed, position, token). The score of a token does
not depend on the filters or on the other rows; filters only say which tokens take part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.messages import SamplingParams
from dovetail.runtime.device.draw_params import DrawParams
from dovetail.runtime.sampling.random import exponentials, row_keys

CANDIDATES = 1024
"""Rows whose filters leave at most this many tokens are never sorted in full."""
BLOCK = 1 << 19
"""Logits that are worked on at once on the CPU: what is made of them stays in its caches and needs no fresh pages."""


def is_filtered(p: SamplingParams) -> bool:
    """Whether any of the filters is on."""
    return p.top_k > 0 or p.top_p < 1 or p.min_p > 0


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """`(logits - max) / temperature` `[R, V]` float32; the maximum first: a tiny temperature must not overflow."""
    safe = torch.where(temperature > 0, temperature, 1.0)
    return (logits - logits.max(dim=-1, keepdim=True).values) / safe[:, None]


def draw(logits: Tensor, p: DrawParams, greedy: Tensor | None = None, *, filtered: bool = True) -> Tensor:
    """Draw one token per row, `[R, V]` to `[R]` int64: on CUDA in two kernels, fit for a graph, else in torch.

    Args:
        logits: Any float dtype; not changed.
        p: Parameters by row; rows with temperature 0 take their best token.
        greedy: `[R]` int64, the best token of each row, where it is known.
        filtered: Whether any row has a filter on. The kernel finds out by itself.
    """
    if logits.is_cuda:
        from dovetail.runtime.sampling import draw_triton  # imports Triton, which only CUDA tensors need

        return draw_triton.draw(logits, p, greedy)
    rows = 1 if p.apart else max(1, BLOCK // logits.shape[-1])
    if logits.device.type != "cpu" or logits.shape[0] <= rows:
        return _draw_block(logits, p, filtered=filtered)
    starts = range(0, logits.shape[0], rows)
    return torch.cat([_draw_block(logits[i : i + rows], p.rows(slice(i, i + rows)), filtered=filtered) for i in starts])


def _draw_block(logits: Tensor, p: DrawParams, *, filtered: bool) -> Tensor:
    scores = scaled(logits.float(), p.temperature)
    on = _is_filtered(p)
    if not filtered or not on.any():
        found = draw_any(scores, p)
    else:
        found = draw_short(scores, p, min(CANDIDATES, logits.shape[-1]))
        if not on.all():
            found = torch.where(on, found, draw_any(scores, p))
    return torch.where(p.temperature > 0, found, logits.argmax(dim=-1))


def draw_short(scores: Tensor, p: DrawParams, width: int) -> Tensor:
    """`draw_filtered` with a short list of candidates, and with all tokens for the rows where it is too short."""
    found, enough = draw_filtered(scores, p, width)
    again = torch.nonzero(_is_filtered(p) & ~enough)[:, 0]
    if len(again) == 0:
        return found
    return found.index_copy(0, again, draw_filtered(scores[again], p.rows(again), scores.shape[-1])[0])


def _is_filtered(p: DrawParams) -> Tensor:
    return (p.top_k > 0) | (p.top_p < 1) | (p.min_p > 0)


def draw_any(scores: Tensor, p: DrawParams) -> Tensor:
    """Draw from all tokens; `[R, V]` scaled logits to `[R]` int64."""
    tokens = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    return (scores - exponentials(row_keys(p.seeds, p.positions), tokens).log()).argmax(dim=-1)


def draw_filtered(scores: Tensor, p: DrawParams, width: int) -> tuple[Tensor, Tensor]:
    """Draw from what the filters leave of the `width` best tokens.

    Returns:
        Tokens `[R]` int64, and `[R]` bool: whether the filters of the row provably cut within `width` tokens. Where
        not, the token is not valid and the row has to be drawn again with a larger width.
    """
    vocab = scores.shape[-1]
    best, tokens = _ordered(scores, width)
    probs = (best - scores.logsumexp(dim=-1, keepdim=True)).exp()
    races = best - exponentials(row_keys(p.seeds, p.positions), tokens.to(torch.int32)).log()
    kept = keep_mask(probs, p)
    chosen = torch.where(kept, races, float("-inf")).argmax(dim=-1, keepdim=True)
    # Where the last candidate's equals are kept, some of them may be missing from the list.
    is_clear = ~(kept & (best == best[:, -1:])).any(dim=-1)
    return tokens.gather(1, chosen)[:, 0], _enough(probs, p, width == vocab) & (is_clear | (width == vocab))


def _ordered(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best scores and their tokens, equal ones by token."""
    if width == scores.shape[-1]:
        best, tokens = scores.sort(dim=-1, descending=True, stable=True)
        return best, tokens
    tokens = scores.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    best, order = scores.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    return best, tokens.gather(1, order)


def _enough(probs: Tensor, p: DrawParams, is_all: bool) -> Tensor:
    if is_all:
        return torch.ones_like(p.top_k, dtype=torch.bool)
    by_k = (p.top_k > 0) & (p.top_k <= probs.shape[1])
    by_p = (p.top_p < 1) & (probs.sum(-1) >= p.top_p + 1e-4)
    by_min = (p.min_p > 0) & (probs[:, -1] < p.min_p * probs[:, 0])
    return by_k | by_p | by_min


def keep_mask(probs: Tensor, p: DrawParams) -> Tensor:
    """Which of the sorted probabilities `[R, K]` survive top-k, then top-p of what is left, then min-p.

    The most likely token always survives. Top-p keeps the smallest set whose mass reaches `top_p` of what top-k left.
    """
    width = probs.shape[1]
    top_k = torch.where(p.top_k > 0, p.top_k, width)[:, None]
    top_p, min_p = p.top_p[:, None], p.min_p[:, None]
    kept = torch.arange(width, device=probs.device) < top_k
    left = torch.where(kept, probs, 0.0)
    before = left.cumsum(-1) - left
    total = torch.where(top_k < width, left.sum(-1, keepdim=True), 1.0)
    kept &= (top_p >= 1) | (before < top_p * total)
    kept &= probs >= min_p * probs[:, :1]
    return torch.cat((torch.ones_like(kept[:, :1]), kept[:, 1:]), dim=-1)
