"""How ranks exchange tensors: `Communicator`, and `PeerMemory`, which kernels of sums over ranks read.

A device whose ranks exchange tensors by themselves returns a communicator (`Device.communicator`); elsewhere the core's
own does it through the host. Importing this module does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class PeerMemory(NamedTuple):
    """Memory of each rank of a host, which all of them see.

    Attributes:
        rank: This one.
        size: How many there are, N.
        own: This rank's, `[bytes]` uint8, zeros at first.
        pointers: Address of each rank's, as this device sees it, `[N]` int64.
        is_alone: This rank stands for all: every pointer is that of `own`. So kernels are rehearsed before ranks meet.
        handle: What keeps the others' memory in place, for the communicator.
    """

    rank: int
    size: int
    own: Tensor
    pointers: Tensor
    is_alone: bool = False
    handle: Any = None

    @classmethod
    def alone(cls, rank: int, size: int, num_bytes: int, device: torch.device) -> PeerMemory:
        """Return memory of a rank that stands for all."""
        import torch

        own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        pointers = torch.full((size,), own.data_ptr(), dtype=torch.int64, device=device)
        return cls(rank, size, own, pointers, is_alone=True)


class Communicator(Protocol):
    """Collectives of the ranks.

    Attributes:
        rank: This one.
        is_broken: A collective has failed: the ranks have come apart for good.
        shares_memory: Ranks may see each other's memory; `share` finds out.
    """

    rank: int
    is_broken: bool
    shares_memory: bool

    def connect(self, meeting: Path, connect_s: float, timeout_s: float) -> None:
        """Meet the other ranks by a file that they all name.

        Args:
            meeting: The file.
            connect_s: Seconds to wait for them.
            timeout_s: Seconds that one collective may take from now on, where the host waits for it.

        Raises:
            RuntimeError: They did not come.
        """

    def share(self, num_bytes: int) -> PeerMemory | None:
        """Return memory that all ranks see, zeros on all of them; None on all ranks where one of them has none.

        All ranks call it, with the same number, once they are connected. It stays in place until `close`.
        """
        ...

    def all_reduce(self, share: Tensor) -> Tensor:
        """Return the sum of all ranks' shares, the same bits on all; `share` may be written to.

        Raises:
            RuntimeError: A rank has ended, or hangs.
        """
        ...

    def all_gather(self, mine: Tensor) -> Tensor:
        """Return what all ranks have, `[size, …]`.

        Raises:
            RuntimeError: A rank has ended, or hangs.
        """
        ...

    def close(self) -> None:
        """Leave the others."""
