"""Collectives of ranks on GPUs of one host: NCCL, and in steps of few rows kernels over memory that all of them see.

NCCL is what every step could do. Where torch's symmetric memory can be had, sums of few rows are made by kernels of our
own (`layers/ops/peer_sum.py`), with what is done to the sum anyway: both are launched on the current stream, so graphs
can hold them, and in one order on all ranks. NVLink multicast is not used.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.contracts.layers import FusedSums
from dovetail.runtime.device.devices import device_of
from dovetail.sdk.layers.ops.peer_sum import PeerBuffers, peer_sum

logger = logging.getLogger(__name__)

PEER_SUMS = "DOVETAIL_PEER_SUMS"
"""Set it to 0 for NCCL alone."""
MAX_ROWS = 256
"""Rows of a sum that our kernels make; more are prompts, of which NCCL makes better use of the links."""
MAX_WIDTH = 16384
CLOSE_S = 5.0
POLL_S = 0.01


class CudaCommunicator:
    """See `Communicator` and `FusedSums`. Until it is connected, a rank stands for all: kernels are rehearsed so."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Nothing is connected yet."""
        self.rank, self._size, self._device, self.is_broken = rank, size, device, False
        self.fused: FusedSums | None = self
        self._group: Any = None
        self._peers: PeerBuffers | None = None
        self._rehearsed: PeerBuffers | None = PeerBuffers.alone(rank, size, MAX_ROWS, MAX_WIDTH, device)

    def connect(self, meeting: Path, connect_s: float, timeout_s: float) -> None:
        """See `Communicator`.

        NCCL waits on the device, not on the host: whoever launches a step looks after it, and `timeout_s` is not used.
        """
        distributed: Any = dist  # whose stubs lack what follows
        if dist.is_initialized():
            raise RuntimeError("this process has a torch.distributed group already; ranks on GPUs need their own")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast
        store = distributed.FileStore(str(meeting), self._size)
        dist.init_process_group(
            "nccl",
            store=store,
            rank=self.rank,
            world_size=self._size,
            device_id=self._device,
            timeout=timedelta(seconds=connect_s),
        )
        self._group, self._rehearsed = dist.group.WORLD, None
        dist.all_reduce(torch.zeros(1, device=self._device))  # NCCL connects with the first one
        self._peers = self._meet_in_memory()
        device_of(self._device).synchronize()

    def _meet_in_memory(self) -> PeerBuffers | None:
        """Return memory that all ranks see, or None where some rank has none."""
        found, why = None, f"{PEER_SUMS}=0"
        if os.environ.get(PEER_SUMS, "1") != "0":
            try:
                found, why = self._make_buffers(), ""
            except (RuntimeError, ImportError, AttributeError) as error:  # of drivers, of torch
                why = str(error).splitlines()[0]
        have = torch.tensor([found is not None], dtype=torch.int32, device=self._device)
        dist.all_reduce(have, op=dist.ReduceOp.MIN)
        if not bool(have.item()):
            logger.warning("Ranks add up through NCCL alone: %s.", why or "another rank has no shared memory")
            return None
        logger.info("Ranks add up to %d rows in memory that all of them see, more through NCCL.", MAX_ROWS)
        return found

    def _make_buffers(self) -> PeerBuffers:
        from torch.distributed import _symmetric_memory

        symmetric: Any = _symmetric_memory
        num_bytes = PeerBuffers.num_bytes(self._size, MAX_ROWS, MAX_WIDTH)
        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=self._device)
        own.zero_()
        handle = symmetric.rendezvous(own, self._group)
        device_of(self._device).synchronize()
        dist.barrier()  # no rank signals to one that has yet to write its zeros
        pointers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=self._device)
        return PeerBuffers.make(self.rank, self._size, MAX_ROWS, MAX_WIDTH, own, pointers, handle)

    def all_reduce(self, share: Tensor) -> Tensor:
        """See `Communicator`."""
        if (peers := self._peers_for(share)) is not None:
            return peer_sum(share, peers)[0]
        if self._group is not None:
            share = share.contiguous()
            dist.all_reduce(share, group=self._group)
        return share

    def all_gather(self, mine: Tensor) -> Tensor:
        """See `Communicator`."""
        if self._group is None:
            return mine.expand(self._size, *mine.shape).contiguous()
        found = torch.empty(self._size, *mine.shape, dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(found.view(-1), mine.contiguous().view(-1), group=self._group)
        return found

    def add(self, share: Tensor, value: Tensor) -> Tensor | None:
        """See `FusedSums`."""
        peers = self._peers_for(share) if value.dtype == share.dtype else None
        return None if peers is None else peer_sum(share, peers, value)[0]

    def add_norm(self, share: Tensor, value: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        """See `FusedSums`."""
        peers = self._peers_for(share) if value.dtype == weight.dtype == share.dtype else None
        if peers is None:
            return None
        total, normed = peer_sum(share, peers, value, weight, eps)
        return None if normed is None else (normed, total)

    def _peers_for(self, share: Tensor) -> PeerBuffers | None:
        """What a sum of this shape is made through; None: NCCL."""
        is_small = share.dim() == 2 and share.shape[0] <= MAX_ROWS and share.shape[1] <= MAX_WIDTH
        if not is_small or not share.shape[0] or share.dtype not in (torch.bfloat16, torch.float16):
            return None
        return self._rehearsed if self._group is None else self._peers

    def close(self) -> None:
        """See `Communicator`.

        Where a rank was lost amid a step, the device waits for it for ever. Freeing memory that all ranks see waits for
        the device, and so does NCCL: both are left to the end of the process.
        """
        group, self._group = self._group, None
        if group is None:
            self._peers = None
            return
        if not _is_idle_within(self._device, CLOSE_S):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._peers))  # its destructor would never return
            logger.warning("A rank was lost, and the device waits for it. What the ranks share ends with the process.")
            return
        self._peers = None
        leaving = threading.Thread(target=_leave, name="dovetail-leave-ranks", daemon=True)
        leaving.start()
        leaving.join(CLOSE_S)
        if leaving.is_alive():
            logger.warning("The ranks' communicator does not close: a rank was lost. It ends with the process.")


def _is_idle_within(device: torch.device, limit_s: float) -> bool:
    """Whether the device comes to the end of what was sent to it, in so many seconds."""
    found, until = device_of(device), time.monotonic() + limit_s
    while not found.is_idle():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def _leave() -> None:
    try:
        dist.destroy_process_group()
    except Exception as error:  # the process ends; only why is of interest
        logger.warning("The ranks' communicator was not closed: %s", error)
