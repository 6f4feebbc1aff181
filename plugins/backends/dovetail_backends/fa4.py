"""Attention by an installed FlashAttention-4, over the paged KV cache. Needs a GPU of compute capability 9.x.

The package `flash-attn-4` has kernels in Python, over CuTe DSL, which are compiled when they are first launched. Served
is what its Hopper kernel does: pages of any size where a head's width is a multiple of 16, windows, soft caps and sinks
(which are part of the kernel). It does not split keys there, so a few decode rows over long contexts leave most of the
device idle. Lengths and page tables are read on the device, and the launch goes to torch's current stream, so it can be
captured; the library is told no lengths by the host, so that one kernel serves rows and chunks of a layer.

Source: `flash_attn/cute/interface.py` and `flash_fwd_sm90.py` of flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

import torch

from dovetail.contracts.attention import KVPool
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import UnsupportedError
from dovetail.contracts.needs import AttentionCaps
from dovetail_backends.fa4_library import find_library, missing, prepare, variants_of, versions
from dovetail_backends.flash import FlashBackend

MAX_GROUP = 128
"""Most query heads of a KV head that the kernel packs."""


class FlashAttention4Backend(FlashBackend):
    """Calls FlashAttention-4 for decode rows and for prefill chunks."""

    caps = AttentionCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=frozenset(range(16, 257, 16)),
        graph="mixed",
        sliding_window=True,
        soft_cap=True,
        sinks=True,
    )

    @classmethod
    def why_not(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, page_size: int) -> str | None:
        """As the default; and a GPU of another kind, or a FlashAttention-4 that is not there or is another version."""
        reason = super().why_not(config, device, dtype, page_size) or missing()
        if reason is not None:
            return reason
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
            major, minor = torch.cuda.get_device_capability(device)
            return f"compute capability {major}.{minor} is not supported; FlashAttention-4 is served on 9.x"
        group = max(spec.num_qo_heads // spec.num_kv_heads for spec in config.layers)
        if group > MAX_GROUP:
            return f"{group} query heads for each KV head are too many; FlashAttention-4 packs {MAX_GROUP}"
        found = find_library()
        return found if isinstance(found, str) else None

    @classmethod
    def library(cls) -> str:
        """See `AttentionBackend.library`."""
        return versions()

    def __init__(self, config: ModelConfig, kv_pool: KVPool, device: torch.device) -> None:
        """Compile all kernels that the layers will launch: none is left to a step."""
        found = find_library()
        if isinstance(found, str):
            raise UnsupportedError(found)
        super().__init__(config, kv_pool, device, found)
        dtype = kv_pool.layer(config.layers[0].index).dtype
        prepare(found, variants_of(config, dtype, kv_pool.page_size), device)
