"""Attention written out in float64, and with the mistakes that are usually made: they give a wrong result its name.

Letters: B requests, T tokens, L keys of a request, Hq and Hk query and KV heads, D and Dv widths of a key and of a
value head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer


@dataclass(frozen=True, slots=True)
class Mistake:
    """A way to get attention wrong; the default is none of them."""

    sentence: str = ""
    ignores_window: bool = False
    window_shift: int = 0
    ignores_chunk: bool = False
    slides_chunk: bool = False
    ignores_sinks: bool = False
    ignores_soft_cap: bool = False
    scale: float | None = None
    interleaves_heads: bool = False
    ignores_prefix: bool = False
    sees_the_future: bool = False
    is_causal: bool = False
    looks_back_only: bool = False
    ignores_spans: bool = False
    clips_spans: bool = False
    sees_later_spans: bool = False
    misses_newest: int = 0


RIGHT = Mistake()


Spans = Sequence[tuple[int, int]]
"""Of a request: place of the first token of each image, and of the one behind its last."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mistake: Mistake = RIGHT, spans: Spans = ()
) -> Tensor:
    """Attend one request's new queries `[n, Hq, D]` over all its keys `[L, Hk, D]`; returns float64 `[n, Hq, Dv]`."""
    num_new, num_all = q.shape[0], k.shape[0]
    heads = torch.arange(q.shape[1], device=q.device)
    group = q.shape[1] // k.shape[1]
    kv_head = heads % k.shape[1] if mistake.interleaves_heads else heads // group
    queries, keys, values = q.double(), k.double()[:, kv_head], v.double()[:, kv_head]
    scale = layer.scale if mistake.scale is None else mistake.scale
    scores = torch.einsum("nhd,lhd->hnl", queries, keys) * scale
    if layer.soft_cap is not None and not mistake.ignores_soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    seen = _seen(num_new, num_all, layer, mistake, q.device)
    if layer.spans:
        seen = _with_spans(seen, spans, mistake)
    scores = scores.masked_fill(~seen, float("-inf"))
    if layer.sinks is not None and not mistake.ignores_sinks:
        sinks = layer.sinks.double().to(q.device)[:, None, None].expand(-1, num_new, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, values)


def _seen(num_new: int, num_all: int, layer: AttentionLayer, mistake: Mistake, device: torch.device) -> Tensor:
    """Which key each query sees, `[n, L]`."""
    window, chunk = layer.sliding_window, layer.chunk_size
    places = torch.arange(num_all, device=device)
    if not layer.causal:
        return _seen_bidirectional(places, None if mistake.ignores_window else window, mistake)
    queries = places[num_all - num_new :, None] - mistake.misses_newest
    seen = places <= queries.clamp(min=0)
    if mistake.sees_the_future:
        seen = torch.ones_like(seen)
    if window is not None and not mistake.ignores_window:
        seen &= places > queries - (window + mistake.window_shift)
    if chunk is not None and not mistake.ignores_chunk:
        seen &= places > queries - chunk if mistake.slides_chunk else places >= queries - queries % chunk
    if mistake.ignores_prefix:
        seen &= places >= num_all - num_new
    return seen | (places == num_all - num_new) if not bool(seen.any(-1).all()) else seen


def _with_spans(seen: Tensor, spans: Spans, mistake: Mistake) -> Tensor:
    """Let the last queries of a request see all of their own span."""
    num_new, num_all = seen.shape
    places = torch.arange(num_all, device=seen.device)
    queries = places[num_all - num_new :, None]
    for first, end in () if mistake.ignores_spans else spans:
        is_here = (queries >= first) & (queries < end)
        own = (places >= first) & ((places < end) | mistake.sees_later_spans)
        if mistake.clips_spans:
            own = own & (places >= queries)
        seen = seen | (is_here & own)
    return seen


def _seen_bidirectional(places: Tensor, window: int | None, mistake: Mistake) -> Tensor:
    """Which key each query of a whole prompt sees, `[L, L]`."""
    ahead = places - places[:, None]
    seen = ahead <= 0 if mistake.is_causal else torch.ones_like(ahead, dtype=torch.bool)
    if window is None:
        return seen
    size = window + mistake.window_shift
    return seen & (ahead > -size) & ((ahead < size) | mistake.looks_back_only)


def mistakes(layer: AttentionLayer) -> Iterator[Mistake]:
    """Yield the mistakes that make a difference for this layer."""
    usual = layer.qk_dim**-0.5
    if not layer.causal:
        yield Mistake("it is causal, and the layer is not: a token sees those behind it, too", is_causal=True)
    if not layer.causal and layer.sliding_window is not None:
        yield Mistake("its sliding window bounds what is before a token only", looks_back_only=True)
    if layer.sliding_window is not None:
        yield Mistake("it ignores the sliding window", ignores_window=True)
        yield Mistake("its sliding window is one token too wide", window_shift=1)
        yield Mistake("its sliding window is one token too narrow", window_shift=-1)
    if layer.chunk_size is not None:
        yield Mistake("it ignores the chunk", ignores_chunk=True)
        yield Mistake("it takes the chunk for a sliding window", slides_chunk=True)
    if layer.sinks is not None:
        yield Mistake("it ignores the sinks", ignores_sinks=True)
    if layer.soft_cap is not None:
        yield Mistake("it ignores the soft cap of the scores", ignores_soft_cap=True)
    if abs(layer.scale - usual) > 1e-9:
        yield Mistake("it multiplies scores by 1/sqrt(head_dim), not by layer.scale", scale=usual)
    yield Mistake("it does not multiply scores by layer.scale", scale=1.0)
    yield Mistake(
        "its scale is wrong with grouped heads: it divides layer.scale by the square root of the group",
        scale=layer.scale / (layer.num_qo_heads / layer.num_kv_heads) ** 0.5,
    )
    if 1 < layer.num_kv_heads < layer.num_qo_heads:
        yield Mistake(
            "it takes KV head h % num_kv_heads for query head h; grouped heads are neighbours: h // group",
            interleaves_heads=True,
        )
    if layer.spans:
        yield Mistake("it is causal within an image: its tokens see those behind them, too", ignores_spans=True)
        yield Mistake("a token sees what is behind its image", sees_later_spans=True)
    if layer.spans and layer.sliding_window is not None:
        yield Mistake("a sliding window bounds what a token sees of its own image", clips_spans=True)
    if not layer.causal:
        return
    yield Mistake("it ignores the cached prefix", ignores_prefix=True)
    yield Mistake("it is not causal: a prefill token sees those behind it", sees_the_future=True)
    yield Mistake("it misses the newest token: seq_lens counts this step's tokens too", misses_newest=1)


def error_by_token(got: Tensor, want: Tensor) -> Tensor:
    """Relative error of each token, `[T]`; infinite where the result is not finite."""
    errors = (got.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp(min=1e-6)
    return torch.nan_to_num(errors, nan=float("inf"))


Parts = Sequence[tuple[Tensor, Tensor, Tensor]]
"""Queries, keys and values of each request."""


def attend_all(parts: Parts, layer: AttentionLayer, mistake: Mistake = RIGHT, spans: Sequence[Spans] = ()) -> Tensor:
    """Attend every request of a batch, `[T, Hq, D]`; `spans` are those of the first requests."""
    each = [*spans, *[()] * (len(parts) - len(spans))]
    return torch.cat([attend(q, k, v, layer, mistake, own) for (q, k, v), own in zip(parts, each, strict=True)])
