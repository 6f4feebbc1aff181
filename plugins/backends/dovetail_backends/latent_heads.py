"""Prefill of latent layers by keys and values of heads: rows are expanded piece by piece, and partial sums merged.

When that is less work than the absorbed form, and the form in plain torch, which is the reference of others.

Tn new tokens of a chunk, L tokens of a piece, Hq query heads, D width of a row, R of its first numbers, of which all is
made, N and V widths of the key and the value that are made; a key ends with the last `D - R` numbers of the row.

Source: DeepSeek-V2, arXiv:2405.04434; merging as FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer, ForwardBatch, KVPool
from dovetail.sdk.cache import read_scaled
from dovetail_backends.torch_layouts import widened

PIECE_BYTES = 64 << 20
"""What the keys and values of a piece may take, so that a long prefix takes no more memory than a short one."""
SHORTEST = 32
"""Average length from which chunks are worth it: each has its own products, which are not filled by fewer rows."""


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """A stretch of a chunk's tokens, cached ones and new ones.

    Attributes:
        rows: `[L, D]`, out of the pool.
        made: `[L, Hq, N + V]`, what is made of them.
        start: Place of its first token.
        is_last: No piece of this chunk follows.
    """

    rows: Tensor
    made: Tensor
    start: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """New tokens of one request: `first … end - 1` of those that prefill, behind `num_cached` others."""

    request: int
    first: int
    end: int
    num_cached: int


def chunks_of(batch: ForwardBatch) -> list[PrefillChunk]:
    """Return the prefill chunks of a step."""
    ends = [0]
    for length in batch.q_lens_cpu[batch.num_decode :]:
        ends.append(ends[-1] + length)
    places = range(batch.num_decode, batch.num_requests)
    return [
        PrefillChunk(request, first, end, batch.seq_lens_cpu[request] - (end - first))
        for request, (first, end) in zip(places, pairwise(ends), strict=True)
    ]


def is_less_work(layer: AttentionLayer, heads: Tensor, chunks: list[PrefillChunk]) -> bool:
    """Whether to make keys and values of heads, by the multiplications that one head takes.

    Of each pair of a query and a key the absorbed form takes `D + R`, this one `N + D - R + V`: at DeepSeek's widths
    1,088 and 320. Both multiply the new tokens by `R (N + V)`, the one their queries and results, the other their rows;
    this one also every cached row. So a chunk over a long prefix must have some 170 tokens, and without a prefix any
    length will do. On two CPU cores (16 heads, bfloat16) 512 tokens alone take 0.58 of the time, 2,048 0.43, 512 over
    8,000 0.61, 256 over as many 1.08.

    Windows, chunks of attention, caps and sinks stay with the absorbed form: no published model has them.
    """
    if layer.sliding_window is not None or layer.chunk_size is not None:
        return False
    if layer.soft_cap is not None or layer.sinks is not None:
        return False
    width, rank = heads.shape[1], heads.shape[2]
    num_new = sum(chunk.end - chunk.first for chunk in chunks)
    num_cached = sum(chunk.num_cached for chunk in chunks)
    pairs = sum((c.end - c.first) * (2 * c.num_cached + c.end - c.first + 1) // 2 for c in chunks)
    return num_new >= SHORTEST * len(chunks) and pairs * (2 * rank - width) > num_cached * rank * width


def pieces(
    pool: KVPool, layer: AttentionLayer, heads: Tensor, chunk: PrefillChunk, batch: ForwardBatch
) -> Iterator[ChunkPiece]:
    """Expand what a chunk attends, piece by piece, from the first token on; a piece begins with a page."""
    cache, size = pool.tensor(layer.index, "latent"), pool.page_size

    def read(pages: Tensor) -> Tensor:
        is_scaled = cache.dtype.itemsize == 1
        return read_scaled(pool, layer.index, "latent", pages).to(heads.dtype) if is_scaled else cache[pages]

    table = batch.page_table[batch.rows[chunk.request]]
    num_all = chunk.num_cached + chunk.end - chunk.first
    a_page = size * heads.shape[0] * heads.shape[1] * heads.element_size()
    step = max(1, PIECE_BYTES // a_page) * size
    weight = heads.reshape(-1, heads.shape[2])
    for start in range(0, num_all, step):
        end = min(start + step, num_all)
        rows = read(table[start // size : -(-end // size)].long()).flatten(0, 1)[: end - start]
        made = rows[:, : layer.v_dim] @ weight.t()
        yield ChunkPiece(rows, made.view(end - start, heads.shape[0], -1), start, end == num_all)


def extend_by_heads(
    q: Tensor, heads: Tensor, layer: AttentionLayer, batch: ForwardBatch, pool: KVPool, out: Tensor
) -> bool:
    """Serve `AttentionBackend.forward_extend_latent` on CPU in plain torch where that is less work, or decline."""
    chunks = chunks_of(batch)
    if q.device.type != "cpu" or not is_less_work(layer, heads, chunks):
        return False
    for chunk in chunks:
        queries = q[chunk.first : chunk.end].transpose(0, 1)
        found = queries.new_zeros(*queries.shape[:2], out.shape[2], dtype=torch.float32)
        mass = torch.full(queries.shape[:2], -torch.inf, dtype=torch.float32)
        for piece in pieces(pool, layer, heads, chunk, batch):
            # Queries before the piece see none of it.
            first = max(0, piece.start - chunk.num_cached)
            now, own = _attend_piece(queries[:, first:], piece, layer, chunk.num_cached + first, out.shape[2])
            total = torch.logaddexp(mass[:, first:], own)
            kept, added = ((x - total).exp()[..., None] for x in (mass[:, first:], own))
            found[:, first:] = found[:, first:] * kept + now * added
            mass[:, first:] = total
        out[chunk.first : chunk.end] = found.transpose(0, 1)
    return True


def _attend_piece(
    q: Tensor, piece: ChunkPiece, layer: AttentionLayer, num_before: int, v_dim: int
) -> tuple[Tensor, Tensor]:
    """Attend one piece by itself.

    Args:
        q: `[Hq, Tn, N + D - R]`.
        piece: Its keys and values.
        layer: The layer's facts.
        num_before: Place of the first query.
        v_dim: V.

    Returns:
        What queries find, `[Hq, Tn, V]` float32, and the logarithm of the sum of exponentials of their scores.
    """
    num_heads, num_new, width = q.shape
    made = piece.made.shape[2] - v_dim
    rest = piece.rows[:, None, layer.v_dim :].expand(-1, num_heads, -1)
    keys = torch.cat((piece.made[..., :made], rest), dim=2)
    # torch's attention here has one width for keys and values.
    wide = max(width, v_dim)
    padded = [widened(x, wide).transpose(0, 1)[None] for x in (q.transpose(0, 1), keys, piece.made[..., made:])]
    offset = num_before - piece.start
    mask = None
    if 0 < offset < len(piece.rows) - 1:
        places = torch.arange(len(piece.rows))
        seen = places <= offset + torch.arange(num_new)[:, None]
        mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    # The one attention of torch that also returns the sums.
    found, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *padded, is_causal=offset == 0, attn_mask=mask, scale=layer.scale
    )
    return found[0, :, :, :v_dim].float(), mass[0].float()
