"""Memory for the cache: its dtypes, and zeros that take none before they are written."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from dovetail.contracts.cache import CacheTensor
from dovetail.contracts.device import is_on_host


def dtype_of(tensor: CacheTensor, served: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor of a model that is served in `served`."""
    found: torch.dtype = served if tensor.dtype is None else getattr(torch, tensor.dtype)
    return found


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on the host in a mapping of their own, whose pages take memory when they are first written.

    `torch.zeros` writes all of it: 2 GiB take over a second of every start, most of them for pages never used.

    Raises:
        OSError: The system refuses so large a mapping.
    """
    if not is_on_host(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=dtype).view(shape)
