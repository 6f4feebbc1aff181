"""A rank on the CPU whose memory is a file that the others map, too: `peer_process.py RANK SIZE FOLDER`, interpreted.

Writes to `FOLDER/RANK.safetensors` what its sums are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from dovetail.contracts.device import DeviceView
from dovetail.contracts.layers import BuildContext, Parallel, Stream
from dovetail.contracts.ranks import PeerMemory
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.runtime.ranks import GlooCommunicator
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.plain import PLAIN
from dovetail_backends.kernels.triton import TritonKernels

WIDTH, ROUNDS = 96, 6


class MappedLinks(GlooCommunicator):
    """Over gloo, with memory that ranks share as CUDA's do."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        super().__init__(rank, size)
        self.shares_memory, self._folder = True, folder
        self._mapped: list[list[torch.Tensor]] = []

    def share(self, num_bytes: int) -> PeerMemory:
        """Map a file of each rank."""
        (self._folder / f"memory-{self.rank}").write_bytes(bytes(num_bytes))
        self.all_gather(torch.zeros(1))  # all files are there
        names = [str(self._folder / f"memory-{rank}") for rank in range(self._size)]
        mapped = [torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8) for name in names]
        pointers = torch.tensor([memory.data_ptr() for memory in mapped])
        self._mapped.append(mapped)
        return PeerMemory(self.rank, self._size, mapped[self.rank], pointers)


def share_of(rank: int, at: int, rows: int) -> torch.Tensor:
    """What a rank adds in a round: any rank can make any."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * rank + at)).half()


def main(rank: int, size: int, folder: Path) -> None:
    """Add up as a model on this rank does."""
    links = MappedLinks(rank, size, folder)
    links.connect(folder / "meeting", 60, 60)
    sets = [LoadedSet("triton", "kernels 'triton'", TritonKernels(), True)]
    binder = KernelBinder(sets, DeviceView("cpu", is_interpreted=True), peers=size)
    parallel = Parallel(rank=rank, size=size, all_reduce=links.all_reduce, all_gather=links.all_gather)
    ctx = BuildContext(
        device=torch.device("cpu"), dtype=torch.float16, factory=PLAIN, parallel=parallel, kernels=binder
    )
    norm, sums = RMSNorm(WIDTH, 1e-6, ctx), ctx.rank_sums(WIDTH)
    norm.weight.fill_(1.0)
    binder.freeze()
    binder.connect(links.share)
    found: dict[str, torch.Tensor] = {}
    for at in range(ROUNDS):
        rows = 1 + at % 3
        share, value = share_of(rank, at, rows), share_of(99, at, rows)
        stream = Stream(value).plus_share(share, sums)
        found |= {f"sum{at}": sums(share), f"norm{at}": norm(stream), f"total{at}": stream.total()}
    save_file(found, folder / f"{rank}.safetensors")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
