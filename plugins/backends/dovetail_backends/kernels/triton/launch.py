"""What launches of our kernels share: a device's memory, tiles of products, and scratch that lives between kernels."""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may use; 0 where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    found: int = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return found


@cache
def has_tensor_memory(device: torch.device) -> bool:
    """Whether sums of the tensor cores have a memory of their own, which Triton copies through shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


Tile = tuple[int, int, int, int, int]
"""Of a product: BLOCK_N, BLOCK_K, warps, stages, splits of K."""


@cache
def scratch(device: torch.device, size: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums of split products, and how many splits of a tile have come: zero between kernels."""
    return (
        torch.empty(size, dtype=torch.float32, device=device),
        torch.zeros(tiles, dtype=torch.int32, device=device),
    )


@cache
def counters(device: torch.device, num: int) -> torch.Tensor:
    """Return how many programs have come to each of `num` places: zero between kernels."""
    return torch.zeros(num, dtype=torch.int32, device=device)
