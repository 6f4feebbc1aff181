"""Attention by an installed FlashAttention-3, over the paged KV cache. Chosen by name only; needs a Hopper-class GPU.

FlashAttention-3 (arXiv:2407.08608) is on no package index. What is looked for, in this order:

- `flash_attn_interface` or `flash_attn_3.flash_attn_interface`, as the folder `hopper` of Dao-AILab/flash-attention
  installs them;
- `kernels-community/flash-attn3` by way of the package `kernels`, if it is in the local cache: nothing is downloaded.

Its paged kernel takes any page size (Dao-AILab/flash-attention issue 1627), reads lengths and page table on the device,
and takes the number of splits from the host. That number is always given: 1 where the queries of several requests are
packed, for there a build of this code was seen to leave rows unwritten when it splits (pytorch issue 194167); for
decode rows, which are not packed, more than 1 only if a check at the start finds that splitting changes nothing.

B requests, T tokens, Hq and Hk query and KV heads, D head dim, P page size.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, KVPool, Phase
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.needs import AttentionCaps
from dovetail.errors import UnsupportedError
from dovetail_backends.triton.kv import write_kv

logger = logging.getLogger("dovetail.backends.fa3")

Kernel = Callable[..., Tensor]
MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
HUB_REPO = "kernels-community/flash-attn3"
INSTALL = (
    "install it from the folder `hopper` of github.com/Dao-AILab/flash-attention (it is on no package index), or "
    f"`pip install kernels` and fetch {HUB_REPO} once with kernels.get_kernel"
)
NEEDED = ("page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "window_size", "num_splits")
MAX_SPLITS = 32
PROGRAMS = 264
"""Twice the multiprocessors of an H100 or H200: with fewer programs than that, decode splits its keys."""


class FlashAttention3Backend(AttentionBackend):
    """Calls `flash_attn_with_kvcache` for decode rows and for prefill chunks."""

    caps = AttentionCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=frozenset(range(8, 257, 8)),
        graph="mixed",
        sliding_window=True,
    )

    @classmethod
    def why_not(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, page_size: int) -> str | None:
        """As the default; and a GPU of another kind, or a FlashAttention-3 that is not there."""
        reason = super().why_not(config, device, dtype, page_size)
        if reason is not None:
            return reason
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (8, 9):
            major, minor = torch.cuda.get_device_capability(device)
            return f"compute capability {major}.{minor} is not supported; FlashAttention-3 runs on 8.x and 9.x"
        found = find_kernel()
        return found if isinstance(found, str) else None

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        found = find_kernel()
        if isinstance(found, str):
            raise UnsupportedError(found)
        self.kv_pool = kv_pool
        self._kernel = found
        self._takes_out = "out" in inspect.signature(found).parameters
        self._kv_heads = config.layers[0].num_kv_heads
        self._longest = 0
        self._lens = self._pages = self._starts = torch.empty(0, dtype=torch.int32, device=device)
        self._max_splits = MAX_SPLITS if self._may_split(config, kv_pool, device) else 1

    def plan(self, batch: ForwardBatch, phase: Phase) -> None:
        """Note the longest chunk, which the kernel wants from the host; in a graph it is an upper bound."""
        self._longest = max(batch.q_lens_cpu[batch.num_decode :], default=1)

    def plan_in_graph(self, batch: ForwardBatch) -> None:
        """Gather what the kernel reads: lengths and page table by request, and where each chunk starts.

        In a graph these stand in its memory and are made anew by every replay.
        """
        self._lens = batch.seq_lens.to(torch.int32)
        self._pages = batch.page_table.index_select(0, batch.rows)
        self._starts = (batch.q_starts[batch.num_decode :] - batch.num_decode).to(torch.int32)

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        write_kv(k, v, self.kv_pool.layer(layer.index), batch.kv_slots)

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        """One query per request, `[B, 1, Hq, D]`: not packed, so that it may be split over the keys."""
        num = batch.num_decode
        self._attend(
            q.unsqueeze(1),
            layer,
            out.unsqueeze(1),
            cache_seqlens=self._lens[:num],
            page_table=self._pages[:num],
            num_splits=self._num_splits(num),
        )

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        """Chunks of several requests packed into `[T', Hq, D]`."""
        self._attend(
            q,
            layer,
            out,
            cache_seqlens=self._lens[batch.num_decode :],
            page_table=self._pages[batch.num_decode :],
            cu_seqlens_q=self._starts,
            max_seqlen_q=self._longest,
            num_splits=1,
        )

    def _attend(self, q: Tensor, layer: AttentionLayer, out: Tensor, **arguments: Any) -> None:
        if layer.sinks is not None:
            raise UnsupportedError("attention backend fa3: attention sinks are not supported; use triton")
        kv = self.kv_pool.layer(layer.index)
        if self._takes_out:
            arguments["out"] = out
        window = (-1, -1) if layer.sliding_window is None else (layer.sliding_window - 1, 0)
        found = self._kernel(
            q, kv[:, 0], kv[:, 1], softmax_scale=layer.scale, causal=True, window_size=window, **arguments
        )
        if not self._takes_out:
            out.copy_(found)

    def _num_splits(self, num_requests: int) -> int:
        """Splits of the keys that fill the device; the same for every replay of a graph."""
        return max(1, min(self._max_splits, PROGRAMS // (num_requests * self._kv_heads)))

    def _may_split(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> bool:
        """Whether splitting gives what not splitting gives, for three requests over a few pages of made-up keys."""
        spec = config.layers[0]
        dtype, size = kv_pool.layer(spec.index).dtype, kv_pool.page_size
        pages = -(-600 // size)
        generator = torch.Generator(device=device).manual_seed(0)
        shape = (3 * pages, 2, size, spec.num_kv_heads, spec.qk_dim)
        kv = torch.randn(shape, generator=generator, device=device).to(dtype)
        q = torch.randn(3, 1, spec.num_qo_heads, spec.qk_dim, generator=generator, device=device).to(dtype)
        table = torch.arange(3 * pages, dtype=torch.int32, device=device).view(3, pages)
        lens = torch.tensor([600, 5, 311], dtype=torch.int32, device=device)
        whole, split = (
            self._kernel(q, kv[:, 0], kv[:, 1], cache_seqlens=lens, page_table=table, causal=True, num_splits=num)
            for num in (1, 4)
        )
        same = torch.allclose(whole.float(), split.float(), rtol=2e-2, atol=2e-2)
        if not same:
            logger.warning("this FlashAttention-3 computes wrong results when it splits; decode runs without splits")
        return same


def find_kernel() -> Kernel | str:
    """Return `flash_attn_with_kvcache` of an installed FlashAttention-3, or say in one line why there is none."""
    problems: list[str] = []
    for name, load in [*((name, _importer(name)) for name in MODULES), (HUB_REPO, _from_hub)]:
        try:
            kernel: Kernel = load().flash_attn_with_kvcache
        except ModuleNotFoundError as error:
            if (error.name or "") not in {"kernels", *MODULES, "flash_attn_3"}:
                problems.append(f"{name} needs {error.name}")
        except Exception as error:  # a build for another torch may raise anything when it is imported
            problems.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
        else:
            missing = [argument for argument in NEEDED if argument not in inspect.signature(kernel).parameters]
            if not missing:
                return kernel
            problems.append(f"{name} does not take {', '.join(missing)}; it is another version")
    found = f" ({'; '.join(problems)})" if problems else ""
    return f"FlashAttention-3 is not installed{found}; {INSTALL}"


def _importer(name: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(name)


def _from_hub() -> Any:
    """Load the kernel that the package `kernels` has in its cache."""
    kernels = importlib.import_module("kernels")
    with _offline():
        return kernels.get_kernel(HUB_REPO, version=1)


@contextmanager
def _offline() -> Iterator[None]:
    """Keep huggingface_hub, and `kernels` above it, to what is cached."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
