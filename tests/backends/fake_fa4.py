"""A stand-in for FlashAttention-4 in plain torch: the signature, the checks and the meaning of what the backend calls.

Source: `flash_attn/cute/interface.py` (signature, asserts), `flash_fwd_sm90.py` and `paged_kv.py` (what Hopper's kernel
refuses and reads) of flash-attn-4 4.0.0b36. Nothing is read back to the host, so its calls may stand in a graph. Rows
of the output that no request covers stay as they are.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

NEVER = (
    *("qv", "cu_seqlens_k", "seqused_q", "max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "window_size_right"),
    *("tile_mn", "mma_pv_is_rs", "intra_wg_overlap", "pack_gqa", "_arch", "score_mod", "mask_mod"),
    *("block_sparse_tensors", "lse", "aux_tensors", "aux_scalars", "q_descale", "k_descale", "v_descale"),
    *("gather_kv_indices", "scheduler_metadata", "seqlen_k_per_split"),
)
"""Arguments that the backend leaves alone."""


class FakeFA4(ModuleType):
    """Stands for the module `flash_attn.cute.interface`.

    Attributes:
        calls: What of each accepted call a kernel is specialised on.
    """

    def __init__(self) -> None:
        super().__init__("flash_attn.cute.interface")
        self.calls: list[tuple[Any, ...]] = []

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        learnable_sink: Tensor | None = None,
        tile_mn: tuple[int, int] | None = None,
        mma_pv_is_rs: bool | None = None,
        intra_wg_overlap: bool | None = None,
        num_threads: int = 384,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        _arch: int | None = None,
        score_mod: Any = None,
        mask_mod: Any = None,
        block_sparse_tensors: Any = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        aux_tensors: Any = None,
        aux_scalars: Any = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        gather_kv_indices: Tensor | None = None,
        scheduler_metadata: Any = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False,
    ) -> tuple[Tensor, None, None, None, None]:
        """Attend packed queries over the first `seqused_k` tokens of each request's pages."""
        given = locals()
        if known := [name for name in NEVER if given[name] is not None]:
            raise NotImplementedError(f"this stand-in knows the arguments that the backend needs, not {known}")
        if cu_seqlens_q is None or seqused_k is None or page_table is None or out is None or not causal:
            raise NotImplementedError("this stand-in knows packed, causal queries over a paged cache, and an output")
        check_tensors(q, k, v, page_table, learnable_sink)
        check_lengths(q, page_table, cu_seqlens_q, seqused_k)
        check_output(out, q)
        assert num_splits == 1, "SplitKV not supported on SM 9.0"
        by_tma = k.shape[1] == tile_n(q.shape[-1], is_local=window_size_left is not None)
        irregular = q.shape[-1] % 16 != 0
        assert by_tma or not irregular, "Paged KV does not support irregular head dim"
        self.calls.append(
            (q.dtype, q.shape[1], k.shape[2], q.shape[2], k.shape[1], window_size_left is not None, softcap or 0.0,
             learnable_sink is not None, len(seqused_k) > 256)
        )  # fmt: skip
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        request = torch.searchsorted(cu_seqlens_q[1:].contiguous(), torch.arange(len(q), dtype=torch.int32), right=True)
        is_live = request < len(seqused_k)
        request = request.clamp(max=len(seqused_k) - 1)
        found = attend(
            q, k, v, page_table[request], seqused_k[request].long(),
            (seqused_k[request] - (cu_seqlens_q[1:][request] - torch.arange(len(q)))).long(),
            scale=scale, left=window_size_left, cap=softcap, sinks=learnable_sink, by_tma=by_tma,
        )  # fmt: skip
        out.copy_(torch.where(is_live[:, None, None], found, out))
        return out, None, None, None, None


def tile_n(head_dim: int, *, is_local: bool) -> int:
    """Keys of a tile, as the library chooses them on Hopper for causal attention; pages of so many are loaded whole."""
    if head_dim <= 128:
        return 128
    if head_dim <= 192:
        return 96 if is_local else 112
    return 64 if is_local else 80


def check_tensors(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, sinks: Tensor | None) -> None:
    """Refuse dtypes, shapes and strides that the real one refuses."""
    assert page_table.dtype == torch.int32, "page_table must be int32"
    assert page_table.stride(-1) == 1, "page_table must be contiguous in the last dimension"
    assert v.dtype in (torch.float16, torch.bfloat16), "inputs must be float16, bfloat16, fp8 e4m3fn, or fp8 e5m2"
    assert q.dtype == k.dtype == v.dtype, "q, k, v, and qv must have the same dtype"
    assert q.dim() == 3
    assert k.shape == v.shape
    assert k.shape[-1] == q.shape[-1]
    assert q.shape[1] % k.shape[2] == 0, "num_head must be divisible by num_head_kv"
    assert 0 < q.shape[1] // k.shape[2] <= 128
    dim = q.shape[-1]
    assert dim in range(8, 257, 8), "head_dim and head_dim_v must be between 8 and 256 and divisible by 8."
    if sinks is not None:
        assert sinks.shape == (q.shape[1],)
        assert sinks.dtype in (torch.float16, torch.bfloat16, torch.float32)


def check_lengths(q: Tensor, page_table: Tensor, starts: Tensor, lens: Tensor) -> None:
    """Refuse lengths that do not go together."""
    num = len(starts) - 1
    assert page_table.shape == (num, page_table.shape[1])
    assert lens.shape == (num,), "seqused_k must have shape (batch_size,)"
    for tensor in (starts, lens):
        assert tensor.dtype == torch.int32, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be int32"
        assert tensor.stride(0) == 1, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be contiguous"


def check_output(out: Tensor, q: Tensor) -> None:
    """Refuse an output that a kernel cannot write."""
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    aligned = out.stride(-1) == 1 and not any(stride * out.element_size() % 16 for stride in out.stride()[:-1])
    assert aligned, "out must have aligned strides and a contiguous last dimension"


def attend(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lens: Tensor, at: Tensor, *,
    scale: float, left: int | None, cap: float | None, sinks: Tensor | None, by_tma: bool,
) -> Tensor:  # fmt: skip
    """Attend `[T, Hq, D]`, each token with a table and a length of its own, standing at `at`.

    Pages that are loaded whole are multiplied by zero past a request's end: what stands there must be finite.
    """
    size, group = k.shape[1], q.shape[1] // k.shape[2]
    places = torch.arange(tables.shape[1] * size)
    inside = places < lens[:, None]
    held = places < -(-lens // size)[:, None] * size if by_tma else inside
    tables = torch.where(held[:, ::size], tables, 0)  # entries past a request's pages mean nothing
    keys, values = (x[tables.long()].flatten(1, 2).float().repeat_interleave(group, dim=2) for x in (k, v))
    values = torch.where(held[..., None, None], values, 0.0)
    scores = torch.einsum("thd,tlhd->thl", q.float(), keys) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    seen = inside & (places <= at[:, None])
    if left is not None:
        seen = seen & (places >= at[:, None] - left)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[None, :, None].expand(len(q), -1, 1)), -1)
    weights = scores.softmax(-1)[..., : len(places)]
    return torch.einsum("thl,tlhd->thd", weights, values).to(q.dtype)
