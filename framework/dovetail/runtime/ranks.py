"""`Rank`: one of the processes that compute one model together, as its runtime is told of it; and their collectives.

Every rank has all of a step and some of the heads, inner widths or experts. What each makes of the residual stream is a
share of a sum, which a communicator adds up. Logits are made by every rank, of a part of the vocabulary, and put
together: all have the same, and so draw the same.
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
from dovetail.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Rank:
    """Which rank this is. `memory` is what the first one has planned: pages are the same on all."""

    parallel: Parallel = field(default_factory=Parallel)
    memory: MemoryPlan | None = None


ALONE = Rank()
"""The only one."""


class GlooCommunicator:
    """Collectives over gloo, on this host's own address.

    Shares are added in the order of the ranks, in float32, by everybody: so the sums have the same bits on all ranks,
    whatever way gloo takes, and draws cannot come apart.

    Attributes:
        is_broken: A collective has failed: the ranks have come apart for good.
        num_begun: Collectives that this rank has come to. Whoever has come to the fewest is waited for.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Nothing is connected yet."""
        self._rank, self._size, self.is_broken, self.num_begun = rank, size, False, 0
        self._group: Any = None

    def connect(self, meeting: Path, timeout_s: float) -> None:
        """Meet the other ranks by a file that they all name; waits for them.

        Args:
            meeting: The file.
            timeout_s: How long one collective may take from now on, too.

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

    def all_reduce(self, share: Tensor) -> Tensor:
        """Return the sum of all ranks' shares.

        Raises:
            RuntimeError: A rank has ended, or hangs.
        """
        found = self.all_gather(share)
        total = found[0].float()
        for one in found[1:]:
            total += one
        return total.to(share.dtype)

    def all_gather(self, mine: Tensor) -> Tensor:
        """Return what all ranks have, `[size, …]`.

        Raises:
            RuntimeError: A rank has ended, or hangs.
        """
        if self._group is None:
            raise RuntimeError("the ranks are not connected")
        self.num_begun += 1
        sent = mine.contiguous()
        found = torch.empty(self._size, *sent.shape, dtype=sent.dtype)
        # As bytes: of which dtypes gloo knows nothing.
        try:
            self._group.allgather([[one.view(torch.uint8) for one in found]], [sent.view(torch.uint8)]).wait()
        except RuntimeError:
            self.is_broken = True
            raise
        return found


def parallel_of(settings: EngineSettings, rank: int, group: GlooCommunicator) -> Parallel:
    """Return what a model is built with on a rank."""
    return Parallel(
        rank=rank,
        size=settings.tensor_parallel_size,
        all_reduce=group.all_reduce,
        all_gather=group.all_gather,
        expert_shard=settings.expert_shard,
    )
