"""A stand-in for FlashAttention-3 in plain torch: the signature, the checks and the meaning of its documented function.

Source: `hopper/flash_attn_interface.py` (signature, causal mask, window) and `mha_fwd` in `hopper/flash_api.cpp` (what
is refused) of Dao-AILab/flash-attention. Rows of the output that no request covers stay as `torch.empty` leaves them:
here, NaN.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend `q` over the first `cache_seqlens` tokens of each request's pages."""
        unused = (k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, rotary_seqlens)
        if any(argument is not None for argument in unused) or attention_chunk:
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
            out, lse = attend(q, keys, values, cache_seqlens, scale, left, right, softcap)
        else:
            out, lse = torch.full_like(q, float("nan")), torch.full((q.shape[1], q.shape[0]), float("nan"))
            starts = cu_seqlens_q.tolist()
            for i, (start, end) in enumerate(itertools.pairwise(starts)):
                one = slice(i, i + 1)
                new = q[start:end][None]
                found = attend(new, keys[one], values[one], cache_seqlens[one], scale, left, right, softcap)
                out[start:end], lse[:, start:end] = found[0][0], found[1][0]
        if self.loses_split_rows and num_splits > 1:
            out[1:] = float("nan")
        return (out, lse) if return_softmax_lse else out


class FakeVllm:
    """Stands for the operators of vLLM's library, with the arguments that they have in vLLM 0.25.1 and 0.33.0.

    Source: the schemas and messages in `vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so` of their wheels.
    """

    fwd_arguments: ClassVar[dict[str, bool]] = {
        **dict.fromkeys(("q", "k", "v"), False),
        **dict.fromkeys(
            ("k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
             "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos",
             "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"), True,
        ),
        **dict.fromkeys(
            ("softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap", "is_rotary_interleaved"),
            False,
        ),
        "scheduler_metadata": True, "num_splits": False, "pack_gqa": True, "sm_margin": False, "s_aux": True,
        "cp_world_size": False, "cp_rank": False, "cp_tot_seqused_k": True,
    }  # fmt: skip
    plan_arguments: ClassVar[dict[str, bool]] = {
        **dict.fromkeys(
            ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim", "headdim_v",
             "qkv_dtype", "seqused_k"), False,
        ),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k"), True),
        "page_size": True,
        **dict.fromkeys(
            ("max_seqlen_k_new", "is_causal", "window_size_left", "window_size_right", "has_softcap", "num_splits"),
            False,
        ),
        "pack_gqa": True, "sm_margin": False,
    }  # fmt: skip
    AGREE = ("max_seqlen_q", "max_seqlen_k", "is_causal", "window_size_left", "window_size_right", "num_splits")

    def __init__(self) -> None:
        self.inner = FakeFA3()
        self.plans: list[dict[str, Any]] = []

    def get_scheduler_metadata(self, **given: Any) -> Tensor:
        """Remember what was planned."""
        check_given(given, self.plan_arguments)
        made = torch.zeros(1, dtype=torch.int32)
        self.plans.append({**given, "made": made})
        return made

    def fwd(self, **given: Any) -> list[Tensor]:
        """Refuse what the library refuses, and a schedule made for another call."""
        check_given(given, self.fwd_arguments)
        if given["cu_seqlens_q"] is None:
            raise RuntimeError("This flash attention build only supports varlen (for build size reasons).")
        unused = ("k_new", "v_new", "q_v", "seqused_q", "kv_batch_idx", "leftpad_k", "s_aux", "cu_seqlens_k")
        if any(given[name] is not None for name in unused) or given["cp_world_size"] != 1 or given["cp_rank"] != 0:
            raise NotImplementedError("this stand-in knows the arguments that the backend needs")
        [planned] = [plan for plan in self.plans if plan["made"] is given["scheduler_metadata"]]
        q, k = given["q"], given["k"]
        facts = {
            "batch_size": len(given["seqused_k"]), "num_heads": q.shape[1], "num_heads_k": k.shape[2],
            "headdim": q.shape[2], "headdim_v": q.shape[2], "qkv_dtype": q.dtype, "page_size": k.shape[1],
            "has_softcap": given["softcap"] > 0, **{name: given[name] for name in self.AGREE},
        }  # fmt: skip
        wrong = [name for name, value in facts.items() if planned[name] != value]
        wrong += [n for n in ("seqused_k", "cu_seqlens_q") if planned[n].data_ptr() != given[n].data_ptr()]
        if wrong:
            raise RuntimeError(f"the schedule was made for another call: {', '.join(wrong)}")
        is_single = given["max_seqlen_q"] == 1  # nothing is read back then: it may be recorded
        found, lse = self.inner.flash_attn_with_kvcache(
            q[:, None] if is_single else q, k, given["v"], cache_seqlens=given["seqused_k"],
            page_table=given["page_table"], cu_seqlens_q=None if is_single else given["cu_seqlens_q"],
            max_seqlen_q=None if is_single else given["max_seqlen_q"], causal=given["is_causal"],
            softmax_scale=given["softmax_scale"], softcap=given["softcap"], num_splits=given["num_splits"],
            window_size=(given["window_size_left"], given["window_size_right"]), return_softmax_lse=True,
        )  # fmt: skip
        num = len(q) if is_single else int(given["cu_seqlens_q"][-1])
        given["out"][:num] = found.view(q.shape)[:num]  # rows of nobody stay as they are
        return [given["out"], lse[:, :, 0].t() if is_single else lse, torch.empty(0), torch.empty(0)]


def check_given(given: dict[str, Any], arguments: dict[str, bool]) -> None:
    """An operator without defaults wants every argument, and takes None only where its schema says so."""
    if given.keys() != arguments.keys():
        raise RuntimeError(f"missing or unknown: {sorted(given.keys() ^ arguments.keys())}")
    if wrong := [name for name, value in given.items() if value is None and not arguments[name]]:
        raise RuntimeError(f"None is no value for {', '.join(wrong)}")


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


def attend(
    q: Tensor, keys: Tensor, values: Tensor, lens: Tensor, scale: float, left: int, right: int, cap: float
) -> tuple[Tensor, Tensor]:
    """Attend `[B, n, Hq, D]` to the first `lens` keys, the last query standing at the last key. Reads nothing back.

    Returns:
        `[B, n, Hq, D]`, and `[B, Hq, n]` float32, the logarithms of the sums of the scores' exponentials.
    """
    group = q.shape[2] // keys.shape[2]
    keys, values = (x.float().repeat_interleave(group, dim=2) for x in (keys, values))
    scores = torch.einsum("bnhd,blhd->bhnl", q.float(), keys) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    places = torch.arange(keys.shape[1], device=q.device)
    at = lens[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)
    seen = places < lens[:, None, None]
    if right >= 0:
        seen = seen & (places <= at[..., None] + right)
    if left >= 0:
        seen = seen & (places >= at[..., None] - left)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    weights = scores.softmax(-1)
    # A key past the request's end is read and must not count, whatever stands there.
    values = torch.where((places < lens[:, None])[..., None, None], values, 0.0)
    return torch.einsum("bhnl,blhd->bnhd", weights, values).to(q.dtype), scores.logsumexp(-1)
