"""`Rank`: one of the processes that compute one model together, as its runtime is told of it; and their sums.

Every rank has all of a step and some of the heads, inner widths or experts. What each makes of the residual stream is a
share of a sum, which `GlooSum` adds up. Logits are made by every rank from equal sums, and so are draws.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.contracts.layers import Parallel
from dovetail.runtime.memory import MemoryPlan


@dataclass(frozen=True, slots=True)
class Rank:
    """Which rank this is. `memory` is what the first one has planned: pages are the same on all."""

    parallel: Parallel = field(default_factory=Parallel)
    memory: MemoryPlan | None = None


ALONE = Rank()
"""The only one."""


class GlooSum:
    """Adds up tensors of all ranks over gloo, on this host's own address.

    Shares are added in the order of the ranks, in float32, by everybody: so the sums have the same bits on all ranks,
    whatever way gloo takes, and draws cannot come apart.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Nothing is connected yet. `is_broken` tells of a sum that failed: ranks have come apart for good."""
        self._rank, self._size, self.is_broken = rank, size, False
        self._group: Any = None

    def connect(self, meeting: Path, timeout_s: float) -> None:
        """Meet the other ranks by a file that they all name; waits for them.

        Args:
            meeting: The file.
            timeout_s: How long one sum may take from now on, too.

        Raises:
            RuntimeError: They did not come.
        """
        # A group of its own, not torch's default one: a process may have several engines, and others may use that.
        distributed: Any = dist  # whose stubs lack what follows
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        self._group = gloo(distributed.FileStore(str(meeting), self._size), self._rank, self._size, options)

    def __call__(self, share: Tensor) -> Tensor:
        """Return the sum of all ranks' shares.

        Raises:
            RuntimeError: A rank has ended, or hangs.
        """
        if self._group is None:
            raise RuntimeError("the ranks are not connected")
        sent = share.contiguous()
        found = [torch.empty_like(sent) for _ in range(self._size)]
        # As bytes: of which dtypes gloo knows nothing.
        try:
            self._group.allgather([[one.view(torch.uint8) for one in found]], [sent.view(torch.uint8)]).wait()
        except RuntimeError:
            self.is_broken = True
            raise
        total = found[0].float()
        for one in found[1:]:
            total += one
        return total.to(share.dtype)
