"""Ranks on GPUs of one host, in tables: `python tests/benchmarks/ranks.py all FOLDER… [--ranks 2] [--json FILE]`.

`sums` times the collectives of a decode step in CUDA graphs: our kernel over memory that all ranks see, alone, with the
addition to the stream, and with the norm behind it, beside NCCL; and compares the bits with shares that are added in
rank order. `engine` serves each folder's `config.json` with dummy weights on one rank and on several, and says how many
tokens a second one stream and 64 get. A folder's `@` and what follows are further settings
(`FOLDER@expert_parallel=true,max_running_requests=64`). `--profile 20` records so many decode steps of each load, and
lists what the kernels of each rank take; `--skip-single` serves on several ranks only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranked_engine import RankedEngine, kernels_of
from rich.console import Console
from rich.table import Table

SIZES = ((1, 4096), (4, 4096), (16, 4096), (64, 4096), (256, 4096), (256, 8192))
"""Rows of so many numbers: 8 KB to 4 MB."""
CHECKED = (*SIZES, (3, 4096), (2, 4096))
CALLS, ROUNDS = 50, 20
STREAMS = (1, 64)
NUM_NEW, NUM_PROMPT = 256, 128


def graph_us(work: Callable[[], object]) -> float:
    """Microseconds that one call takes in a graph of many."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    graph.replay()
    torch.cuda.synchronize()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(ROUNDS):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return 1000 * began.elapsed_time(ended) / (CALLS * ROUNDS)


def share_of(rank: int, rows: int, width: int, seed: int) -> torch.Tensor:
    """What a rank adds: any rank can make any."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randn(rows, width, generator=generator).to(torch.bfloat16).cuda()


def bound(links: Any, size: int, width: int) -> tuple[Any, Any]:
    """Return the sums of a model on a rank, bound as an engine binds them, and the memory that its kernels read."""
    from dovetail.contracts.layers import BuildContext, Parallel
    from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
    from dovetail.sdk.layers.plain import PLAIN
    from dovetail_backends.devices.cuda import CudaDevice
    from dovetail_backends.kernels.triton import TritonKernels

    device, kernels = torch.device("cuda", links.rank), TritonKernels()
    sets = [LoadedSet("triton", "kernels 'triton'", kernels, True)]
    binder = KernelBinder(sets, CudaDevice(device).view, captured=True, peers=size)
    parallel = Parallel(rank=links.rank, size=size, all_reduce=links.all_reduce, all_gather=links.all_gather)
    ctx = BuildContext(device=device, dtype=torch.bfloat16, factory=PLAIN, parallel=parallel, kernels=binder)
    sums = ctx.rank_sums(width)
    binder.connect(links.share)
    if "triton" not in {name for use in binder.table for _, _, name in use.served}:
        raise SystemExit("these GPUs have no memory that all ranks see")
    return sums, kernels._peers.buffers


def is_equal(links: Any, sums: Any, peers: Any, size: int) -> bool:
    """Whether sums of all sizes have the bits of shares added in rank order, in graphs that take turns."""
    import torch.distributed as dist

    from dovetail_backends.kernels.triton import MAX_SUM_ROWS
    from dovetail_backends.kernels.triton.peer_sum import PUSHED_ROWS, peer_sum

    good, graphs = True, []
    for index, (rows, width) in enumerate(CHECKED):
        shares = [share_of(rank, rows, width, index) for rank in range(size)]
        summed = shares[0].float()
        for share in shares[1:]:
            summed = summed + share.float()
        expected, value = summed.to(torch.bfloat16), share_of(99, rows, width, index)
        for how in ("pushed", "read", "owners"):
            if how == "pushed" and rows > PUSHED_ROWS:
                continue
            mine = shares[links.rank]
            if rows <= MAX_SUM_ROWS:
                good &= bool(torch.equal(sums(mine), expected))
                good &= bool(torch.equal(sums.add(mine, value, sums.ranks), value + expected))
            found, _ = peer_sum(mine, peers, value, how=how)
            good &= bool(torch.equal(found, value + expected))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, _ = peer_sum(mine, peers, value, how=how)
            graphs.append((graph, out, value + expected, (mine, value)))  # which the graph reads
    for step in range(200):
        graph, out, expected, _ = graphs[(step * step + 3 * step) % len(graphs)]
        out.zero_()
        graph.replay()
        good &= bool(torch.equal(out, expected))
    told = torch.tensor([int(good)], device="cuda")
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told.item())


def work_of_rank(rank: int, size: int, meeting: Path, *, check: bool) -> list[dict[str, Any]]:
    """Time the collectives on one rank; all do the same."""
    import torch.distributed as dist

    from dovetail_backends.devices.cuda import CudaDevice
    from dovetail_backends.devices.cuda_ranks import CudaCommunicator
    from dovetail_backends.kernels.triton.peer_sum import PUSHED_ROWS, peer_sum

    torch.cuda.set_device(rank)
    links = CudaCommunicator(rank, size, CudaDevice(torch.device("cuda", rank)))
    links.connect(meeting, 120, 60)
    added, peers = bound(links, size, SIZES[0][1])
    equal = is_equal(links, added, peers, size)
    found = []
    for rows, width in SIZES[:2] if check else SIZES:
        share, value = share_of(rank, rows, width, 0), share_of(99, rows, width, 0)
        weight = torch.ones(width, dtype=torch.bfloat16, device="cuda")

        def nccl(share: torch.Tensor = share) -> None:
            dist.all_reduce(share)

        found.append(
            {
                "rows": rows,
                "KB": rows * width * 2 / 1024,
                "equal": equal,
                "sum_us": graph_us(lambda share=share: added(share)),
                **{
                    f"{how}_us": graph_us(lambda share=share, how=how: peer_sum(share, peers, how=how))
                    for how in (("pushed", "read", "owners") if rows <= PUSHED_ROWS else ("read", "owners"))
                },
                "add_us": graph_us(lambda share=share, value=value: added.add(share, value, added.ranks)),
                "norm_us": graph_us(
                    lambda share=share, value=value, weight=weight: added.norm(share, value, weight, 1e-6, added.ranks)
                ),
                "nccl_us": graph_us(nccl),
                "logits_us": graph_us(
                    lambda rows=rows: links.all_gather(torch.empty(rows, 64128, dtype=torch.bfloat16, device="cuda"))
                ),
            }
        )
    links.close()
    return found


def sums(size: int, *, check: bool) -> list[dict[str, Any]]:
    """Run a process for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sums.json"
        command = [sys.executable, __file__, "rank", "--ranks", str(size), "--meeting", str(Path(folder) / "meeting")]
        command += ["--json", str(out)] + (["--check"] if check else [])
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(size)]
        try:
            codes = [rank.wait(280) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


async def serve(
    folder: str, num: int, streams: tuple[int, ...], steps: int = 0, traces: Path = Path(), **changes: Any
) -> dict[int, float]:
    """Tokens a second of so many streams, once everybody decodes; by number of streams.

    Records so many `steps` of each load into the folder `traces`.
    """
    engine = RankedEngine(Path(folder), num, **({"max_running_requests": max(streams)} | changes))
    await engine.start()
    try:
        found = {}
        for count in streams:
            found[count] = await engine.rate(count, NUM_PROMPT, NUM_NEW)
            if steps:
                await engine.profile(count, NUM_PROMPT, NUM_NEW, steps, traces)
        return found
    finally:
        await engine.close()


def engines(folders: list[str], size: int, *, skip_single: bool, steps: int) -> list[dict[str, Any]]:
    """Serve each folder on one rank, if it fits, and on several."""
    with tempfile.TemporaryDirectory() as traces:
        found = _engines(folders, size, skip_single, steps, Path(traces))
        for trace in sorted(Path(traces).glob("*.trace.json")):
            show(f"{trace.name.removesuffix('.trace.json')}: kernels, a step", kernels_of(trace, steps))
        return found


def _engines(folders: list[str], size: int, skip_single: bool, steps: int, traces: Path) -> list[dict[str, Any]]:
    found = []
    for given in folders:
        folder, _, more = given.partition("@")
        changes = dict(part.split("=", 1) for part in more.split(",") if part)
        row: dict[str, Any] = {"model": Path(folder).name + (f" ({more})" if more else "")}
        ranked = {name: value for name, value in changes.items() if not name.startswith("expert_parallel")}
        for num, settings in ((1, ranked), (size, changes))[1 if skip_single else 0 :]:
            try:
                rates = asyncio.run(serve(folder, num, STREAMS, steps, traces, **settings))
            except Exception as error:  # one that does not fit on one GPU is served on several all the same
                row[f"error_{num}"] = str(error)[:200]
                continue
            row |= {f"{count}x{num}": round(rate, 1) for count, rate in rates.items()}
        for count in STREAMS:
            if f"{count}x1" in row and f"{count}x{size}" in row:
                row[f"ratio_{count}"] = round(row[f"{count}x{size}"] / row[f"{count}x1"], 3)
        found.append(row)
    return found


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    table = Table(title=title)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{row[n]:.2f}" if isinstance(row.get(n), float) else str(row.get(n, "")) for n in names))
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["sums", "engine", "all", "rank"])
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meeting", type=Path)
    parser.add_argument("--check", action="store_true", help="compare bits; time little")
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS", help="list the kernels of decode steps")
    parser.add_argument("--skip-single", action="store_true", help="do not serve on one rank")
    parser.add_argument("--json", type=Path)
    wish = parser.parse_args()
    if wish.what == "rank":
        found = work_of_rank(wish.rank, wish.ranks, wish.meeting, check=wish.check)
        if wish.rank == 0:
            wish.json.write_text(json.dumps(found))
        return
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "ranks": wish.ranks}
    if wish.what in ("sums", "all"):
        result["sums"] = sums(wish.ranks, check=wish.check)
        show(f"{result['device']}, {wish.ranks} ranks: µs in a graph", result["sums"])
    if wish.what in ("engine", "all"):
        result["engines"] = engines(wish.folders, wish.ranks, skip_single=wish.skip_single, steps=wish.profile)
        show(f"{result['device']}: tokens/s, streams x ranks", result["engines"])
    if wish.json is not None:
        wish.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
