"""A stand-in for FlashAttention-3 in plain torch: the signature, the checks and the meaning of its documented function.

Source: `hopper/flash_attn_interface.py` (signature, causal mask, window) and `mha_fwd` in `hopper/flash_api.cpp` (what
is refused) of Dao-AILab/flash-attention. Rows of the output that no request covers stay as `torch.empty` leaves them:
here, NaN.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 256


class FakeFA3:
    """Stands for the module `flash_attn_interface`.

    Attributes:
        calls: The keyword arguments of every call that was accepted.
        loses_split_rows: Leave the rows after the first request unwritten when splitting, as pytorch issue 194167 saw.
    """

    def __init__(self, *, loses_split_rows: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []
        self.loses_split_rows = loses_split_rows

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        """Attend `q` over the first `cache_seqlens` tokens of each request's pages."""
        unused = (k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, rotary_seqlens)
        if any(argument is not None for argument in unused) or softcap or attention_chunk or return_softmax_lse:
            raise NotImplementedError("this stand-in knows the arguments that the backend needs")
        if cache_seqlens is None or page_table is None:
            raise NotImplementedError("this stand-in knows the paged cache")
        check_tensors(q, k_cache, v_cache, page_table, cache_seqlens)
        check_lengths(q, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q)
        if num_splits < 1:
            raise ValueError("num_splits must be given: the heuristic behind 0 is not to be relied on")
        self.calls.append({"num_splits": num_splits, "max_seqlen_q": max_seqlen_q, "window_size": window_size})
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        left = window_size[0]
        right = 0 if causal else window_size[1]
        keys, values = (gather(cache, page_table) for cache in (k_cache, v_cache))
        if cu_seqlens_q is None:
            out = attend(q, keys, values, cache_seqlens, scale, left, right)
        else:
            out = torch.full_like(q, float("nan"))
            starts = cu_seqlens_q.tolist()
            for i, (start, end) in enumerate(itertools.pairwise(starts)):
                one = slice(i, i + 1)
                new = q[start:end][None]
                out[start:end] = attend(new, keys[one], values[one], cache_seqlens[one], scale, left, right)[0]
        if self.loses_split_rows and num_splits > 1:
            out[1:] = float("nan")
        return out


def check_tensors(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, cache_seqlens: Tensor) -> None:
    """Refuse dtypes, strides and head counts that the real one refuses."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise RuntimeError("query and key must have the same dtype")
    for name, tensor in (("q", q), ("k", k_cache), ("v", v_cache), ("page_table", page_table)):
        if tensor.stride(-1) != 1:
            raise RuntimeError(f"{name} must have contiguous last dimension")
    for name, tensor in (("page_table", page_table), ("seqused_k", cache_seqlens)):
        if tensor.dtype != torch.int32:
            raise RuntimeError(f"{name} must have dtype torch.int32")
    if not cache_seqlens.is_contiguous():
        raise RuntimeError("seqused_k must be contiguous")
    if k_cache.shape != v_cache.shape or k_cache.dim() != 4 or k_cache.shape[-1] != q.shape[-1]:
        raise RuntimeError(
            f"k {list(k_cache.shape)} and v {list(v_cache.shape)}: (num_pages, page_size, h_k, d) expected"
        )
    if q.shape[-1] > MAX_HEAD_DIM or q.shape[-1] % 8:
        raise RuntimeError("head_size should be a multiple of 8 and at most 256")
    if q.shape[-2] % k_cache.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")


def check_lengths(
    q: Tensor, page_table: Tensor, cache_seqlens: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None
) -> None:
    """Refuse batch sizes that do not agree, and packed queries without their lengths."""
    if cu_seqlens_q is not None:
        if cu_seqlens_q.dtype != torch.int32 or not cu_seqlens_q.is_contiguous():
            raise RuntimeError("cu_seqlens_q must be contiguous and have dtype torch.int32")
        if not isinstance(max_seqlen_q, int):
            raise RuntimeError("max_seqlen_q must be provided if cu_seqlens_q is provided")
        if q.dim() != 3:
            raise RuntimeError("q must be (total_q, h, d) if cu_seqlens_q is provided")
        lens = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).tolist()
        if max(lens) > max_seqlen_q:
            raise RuntimeError(f"max_seqlen_q {max_seqlen_q} is less than {max(lens)}: rows would not be computed")
    elif q.dim() != 4:
        raise RuntimeError("q must be (b, s_q, h, d)")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if page_table.dim() != 2 or page_table.shape[0] != batch or cache_seqlens.shape != (batch,):
        raise RuntimeError("batch_size must be equal to batch_size_k")


def gather(cache: Tensor, page_table: Tensor) -> Tensor:
    """Collect pages `[N, P, Hk, D]` by request: `[B, pages * P, Hk, D]`."""
    found = cache[page_table.long()]
    return found.reshape(found.shape[0], -1, *found.shape[3:])


def attend(q: Tensor, keys: Tensor, values: Tensor, lens: Tensor, scale: float, left: int, right: int) -> Tensor:
    """Attend `[B, n, Hq, D]` to the first `lens` keys, the last query standing at the last key. Reads nothing back."""
    group = q.shape[2] // keys.shape[2]
    keys, values = (x.float().repeat_interleave(group, dim=2) for x in (keys, values))
    scores = torch.einsum("bnhd,blhd->bhnl", q.float(), keys) * scale
    places = torch.arange(keys.shape[1], device=q.device)
    at = lens[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)
    seen = places < lens[:, None, None]
    if right >= 0:
        seen = seen & (places <= at[..., None] + right)
    if left >= 0:
        seen = seen & (places >= at[..., None] - left)
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    # A key past the request's end is read and must not count, whatever stands there.
    values = torch.where((places < lens[:, None])[..., None, None], values, 0.0)
    return torch.einsum("bhnl,blhd->bnhd", weights, values).to(q.dtype)
