"""`Rank`: one of the processes that compute one model together, as its runtime is told of it; and their collectives.

Every rank has all of a step and some of the heads, inner widths or experts. What each makes of the residual stream is a
share of a sum, which a communicator adds up. Logits are made by every rank, of a part of the vocabulary, and put
together: all have the same, and so draw the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.base.settings import EngineSettings
from dovetail.contracts.layers import Parallel
from dovetail.contracts.ranks import Communicator, PeerMemory
from dovetail.messages import KernelUse
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.memory.plan import DeviceBytes, MemoryPlan


class Meeting(Protocol):
    """Where ranks wait for each other while they start.

    Attributes:
        attention: Of each cache group, the names of the attention backends for prompts and for decode rows, which the
            first rank sets before the others start; empty until then.
        kernels: What the first rank has measured of kernel sets, likewise.
    """

    attention: tuple[tuple[str, str], ...]
    kernels: tuple[KernelUse, ...]

    def built(self, device: DeviceBytes) -> None:
        """The model is built, and its weights are about to be read.

        Raises:
            ConfigError: The ranks do not go together.
        """

    def loaded(self, left: int, plan: Callable[[int], MemoryPlan]) -> MemoryPlan:
        """The weights are read, and so many bytes are left here.

        Returns:
            `plan`, called by the first rank with the least that any has: pages are the same on all.
        """
        ...

    def connect(self) -> None:
        """All kernels are compiled: from now on there are collectives."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which rank this is, where it meets the others, and by what they exchange tensors; None: it is the only one."""

    parallel: Parallel = field(default_factory=Parallel)
    meeting: Meeting | None = None
    links: Communicator | None = None

    @property
    def decided(self) -> tuple[KernelUse, ...] | None:
        """What the first rank has measured of kernel sets; None on it, and where there is one rank."""
        return None if self.meeting is None or self.parallel.rank == 0 else self.meeting.kernels

    @property
    def peers(self) -> int:
        """How many ranks may see each other's memory; 0: they share none."""
        return self.parallel.size if self.links is not None and self.links.shares_memory else 0


ALONE = Rank()
"""The only one."""


class GlooCommunicator:
    """See `Communicator`: over gloo, on this host's own address.

    Shares are added in the order of the ranks, in float32, by everybody: so the sums have the same bits on all ranks,
    whatever way gloo takes, and draws cannot come apart.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Nothing is connected yet."""
        self.rank, self._size, self.is_broken, self.shares_memory = rank, size, False, False
        self._group: Any = None

    def connect(self, meeting: Path, connect_s: float, timeout_s: float) -> None:
        """See `Communicator`."""
        # A group of its own, not torch's default one: a process may have several engines, and others may use that.
        distributed: Any = dist  # whose stubs lack what follows
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        store = distributed.FileStore(str(meeting), self._size)
        store.set_timeout(timedelta(seconds=connect_s))
        self._group = gloo(store, self.rank, self._size, options)

    def share(self, num_bytes: int) -> PeerMemory | None:
        """See `Communicator`."""
        return None

    def all_reduce(self, share: Tensor) -> Tensor:
        """See `Communicator`."""
        found = self.all_gather(share)
        total = found[0].float()
        for one in found[1:]:
            total += one
        return total.to(share.dtype)

    def all_gather(self, mine: Tensor) -> Tensor:
        """See `Communicator`."""
        if self._group is None:
            raise RuntimeError("the ranks are not connected")
        sent = mine.contiguous()
        found = torch.empty(self._size, *sent.shape, dtype=sent.dtype)
        # As bytes: of which dtypes gloo knows nothing.
        try:
            self._group.allgather([[one.view(torch.uint8) for one in found]], [sent.view(torch.uint8)]).wait()
        except RuntimeError:
            self.is_broken = True
            raise
        return found

    def close(self) -> None:
        """See `Communicator`."""
        self._group = None


def communicator(settings: EngineSettings, rank: int, device: torch.device) -> Communicator:
    """Return what ranks on devices of this kind exchange tensors by."""
    size = settings.tensor_parallel_size
    return device_of(device).communicator(rank, size) or GlooCommunicator(rank, size)


def parallel_of(settings: EngineSettings, links: Communicator) -> Parallel:
    """Return what a model is built with on a rank."""
    return Parallel(
        rank=links.rank,
        size=settings.tensor_parallel_size,
        all_reduce=links.all_reduce,
        all_gather=links.all_gather,
        expert_shard=settings.expert_shard,
    )
