"""Prefill of latent layers by keys and values of heads, in Triton: a kernel for each piece, which carries its sums on.

A grid of (tile of a chunk's new tokens, query head). Of a key two parts are loaded: what was made for the head, and
what all heads share. Between pieces a token's result so far and the logarithm of its sum of exponentials stand in
memory.

The reference is `dovetail_backends.latent_heads`, which also says when this is done; letters as there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer, ForwardBatch, KVPool
from dovetail_backends.latent_heads import ChunkPiece, PrefillChunk, chunks_of, is_less_work, pieces
from dovetail_backends.triton.decode import LOG2E


@triton.jit(do_not_specialize=["num_new", "before", "num_keys"])
def _piece_kernel(
    q, made, rows, so_far, mass, out, scale, num_new, before, num_keys,
    stride_qt, stride_qh, stride_mt, stride_mh, stride_rt, stride_ot, stride_oh,
    HQ: tl.constexpr, N: tl.constexpr, V: tl.constexpr, R: tl.constexpr, REST: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live, token = row < num_new, row.to(tl.int64)
    k, v, e = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :], tl.arange(0, BLOCK_E)[None, :]
    mine = q + token[:, None] * stride_qt + head * stride_qh
    queries = tl.load(mine + k, mask=live[:, None] & (k < N), other=0.0)
    rest_queries = tl.load(mine + N + e, mask=live[:, None] & (e < REST), other=0.0)
    mask = live[:, None] & (v < V)
    carried = so_far + (token * HQ + head)[:, None] * V + v
    if FIRST:
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    else:
        best = tl.load(mass + token * HQ + head, mask=live, other=0.0)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
        acc = tl.load(carried, mask=mask, other=0.0)
    # The piece's key at place p is seen by rows from `p - before` on.
    for at in range(0, tl.minimum(num_keys, before + tile * BLOCK_M + BLOCK_M), BLOCK_N):
        places = at + tl.arange(0, BLOCK_N)
        inside, where = (places < num_keys)[:, None], places.to(tl.int64)[:, None]
        base = made + where * stride_mt + head * stride_mh
        keys = tl.load(base + k, mask=inside & (k < N), other=0.0)
        rest = tl.load(rows + where * stride_rt + R + e, mask=inside & (e < REST), other=0.0)
        values = tl.load(base + N + v, mask=inside & (v < V), other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if REST > 0:
            scores = tl.dot(rest_queries, tl.trans(rest), scores, input_precision="ieee")
        seen = (places < num_keys)[None, :] & (places[None, :] <= (before + row)[:, None])
        scores = tl.where(seen, scores * scale, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        # The first key of the first piece is seen by all, so nothing here is still -inf after it.
        shift = tl.where(new == float("-inf"), 0.0, new)
        shares = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(best - shift)
        acc = tl.dot(shares.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(shares, 1)
        best = new
    result = acc / total[:, None]
    if LAST:
        at = out + token[:, None] * stride_ot + head * stride_oh + v
        tl.store(at, result.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(carried, result, mask=mask)
        tl.store(mass + token * HQ + head, best + tl.log2(total), mask=live)


def extend_by_heads(
    q: Tensor, heads: Tensor, layer: AttentionLayer, batch: ForwardBatch, pool: KVPool, out: Tensor
) -> bool:
    """Serve `AttentionBackend.forward_extend_latent` where that is less work, or decline."""
    chunks = chunks_of(batch)
    if not is_less_work(layer, heads, chunks):
        return False
    for chunk in chunks:
        found = out[chunk.first : chunk.end]
        # Carried from one piece to the next only.
        so_far, mass = (torch.empty(0, dtype=torch.float32, device=q.device) for _ in "ab")
        for piece in pieces(pool, layer, heads, chunk, batch):
            if piece.start == 0 and not piece.is_last:
                so_far, mass = so_far.new_empty(found.shape), mass.new_empty(found.shape[:2])
            _attend_piece(q[chunk.first : chunk.end], piece, layer, chunk, so_far, mass, found)
    return True


def _attend_piece(
    q: Tensor, piece: ChunkPiece, layer: AttentionLayer, chunk: PrefillChunk, so_far: Tensor, mass: Tensor, out: Tensor
) -> None:
    """Attend one piece: `q` `[Tn, Hq, N + D - R]`, `so_far` and `out` `[Tn, Hq, V]`, `mass` `[Tn, Hq]`."""
    num_new, num_heads, width = q.shape
    v_dim, rest = out.shape[2], layer.qk_dim - layer.v_dim
    made = width - rest
    block_m, block_n = (16, 16) if num_new <= 16 else (64, 32 if q.element_size() > 2 else 64)
    _piece_kernel[(triton.cdiv(num_new, block_m), num_heads)](
        q, piece.made, piece.rows, so_far, mass, out,
        layer.scale * LOG2E, num_new, chunk.num_cached - piece.start, len(piece.rows),
        q.stride(0), q.stride(1), piece.made.stride(0), piece.made.stride(1), piece.rows.stride(0),
        out.stride(0), out.stride(1),
        HQ=num_heads, N=made, V=v_dim, R=layer.v_dim, REST=rest, BLOCK_K=max(16, triton.next_power_of_2(made)),
        BLOCK_V=max(16, triton.next_power_of_2(v_dim)), BLOCK_E=max(16, triton.next_power_of_2(rest)),
        BLOCK_M=block_m, BLOCK_N=block_n, FIRST=piece.start == 0, LAST=piece.is_last, num_warps=4, num_stages=2,
    )  # fmt: skip
