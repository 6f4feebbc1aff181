"""Collectives of ranks on GPUs of one host: NCCL, and memory that all of them see for kernels of sums of few rows.

Both launch on the current stream, so graphs can hold them, and in one order on all ranks. The memory is torch's
symmetric memory. NVLink multicast is not used.
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

from dovetail.contracts.device import Device
from dovetail.contracts.ranks import PeerMemory

logger = logging.getLogger(__name__)

PEER_SUMS = "DOVETAIL_PEER_SUMS"
"""Set it to 0 for NCCL alone."""
CLOSE_S = 5.0
POLL_S = 0.01


class CudaCommunicator:
    """See `Communicator`. Until it is connected, a rank stands for all: steps are rehearsed so."""

    def __init__(self, rank: int, size: int, device: Device) -> None:
        """Nothing is connected yet."""
        self.rank, self._size, self._device, self.is_broken = rank, size, device, False
        self.shares_memory = os.environ.get(PEER_SUMS, "1") != "0"
        self._group: Any = None
        self._shared: list[PeerMemory] = []

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
            device_id=self._device.place,
            timeout=timedelta(seconds=connect_s),
        )
        self._group = dist.group.WORLD
        dist.all_reduce(torch.zeros(1, device=self._device.place))  # NCCL connects with the first one
        self._device.synchronize()
        if not self.shares_memory:
            logger.warning("Ranks add up through NCCL alone: %s=0.", PEER_SUMS)

    def share(self, num_bytes: int) -> PeerMemory | None:
        """See `Communicator`."""
        found, why = None, ""
        try:
            found = self._shared_bytes(num_bytes)
        except (RuntimeError, ImportError, AttributeError) as error:  # of drivers, of torch
            why = str(error).splitlines()[0]
        have = torch.tensor([found is not None], dtype=torch.int32, device=self._device.place)
        dist.all_reduce(have, op=dist.ReduceOp.MIN)
        self._device.synchronize()
        if found is None or not bool(have.item()):
            logger.warning("Ranks add up through NCCL alone: %s.", why or "another rank has no shared memory")
            return None
        logger.info(
            "Ranks share %d MiB each, in which sums of few rows are made; more are made through NCCL.", num_bytes >> 20
        )
        self._shared.append(found)
        return found

    def _shared_bytes(self, num_bytes: int) -> PeerMemory:
        from torch.distributed import _symmetric_memory

        symmetric: Any = _symmetric_memory
        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=self._device.place)
        own.zero_()
        handle = symmetric.rendezvous(own, self._group)
        self._device.synchronize()
        dist.barrier()  # no rank signals to one that has yet to write its zeros
        pointers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=self._device.place)
        return PeerMemory(self.rank, self._size, own, pointers, handle=handle)

    def all_reduce(self, share: Tensor) -> Tensor:
        """See `Communicator`."""
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

    def close(self) -> None:
        """See `Communicator`.

        Where a rank was lost amid a step, the device waits for it for ever. Freeing memory that all ranks see waits for
        the device, and so does NCCL: both are left to the end of the process.
        """
        group, self._group = self._group, None
        if group is None:
            self._shared = []
            return
        if not _is_idle_within(self._device, CLOSE_S):
            for memory in self._shared:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # its destructor would never return
            logger.warning("A rank was lost, and the device waits for it. What the ranks share ends with the process.")
            return
        self._shared = []
        leaving = threading.Thread(target=_leave, name="dovetail-leave-ranks", daemon=True)
        leaving.start()
        leaving.join(CLOSE_S)
        if leaving.is_alive():
            logger.warning("The ranks' communicator does not close: a rank was lost. It ends with the process.")


def _is_idle_within(device: Device, limit_s: float) -> bool:
    """Whether the device comes to the end of what was sent to it, in so many seconds."""
    until = time.monotonic() + limit_s
    while not device.is_idle():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def _leave() -> None:
    try:
        dist.destroy_process_group()
    except Exception as error:  # the process ends; only why is of interest
        logger.warning("The ranks' communicator was not closed: %s", error)
