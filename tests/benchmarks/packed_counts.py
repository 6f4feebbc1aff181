"""What bounds products with packed weights on an H200, counted from compiled kernels; needs no GPU.

    python tests/benchmarks/packed_counts.py [--rows 64 256] [--kinds fp8-rows …] [--sites qkv …] [--all]

The four products of a layer of Llama-3.1-8B, each with the kernel and tile that layers use; with `--all` with every
candidate that `packed_floors.py` measures, too. For the kernel that multiplies: rows x outputs x inputs of its tile,
warps, stages and splits of K; registers; bytes of local memory; programs that a multiprocessor holds, of all that there
are, in so many waves; instructions for each number of a weight; KiB of weights that a multiprocessor has asked for at a
time, where Little's law wants `LEAST_IN_FLIGHT`; how it loads, and what it multiplies with.

Then microseconds that the busiest multiprocessor takes for each of what it does: memory, bytes from the second-level
cache, tensor cores, instructions, and sums of split inputs. The greatest of the first four and the last are `=>`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sass
from quant_compiled import empty, weight_of
from quant_products import SITES, Site

from dovetail.contracts.layers import RMSScale
from dovetail_backends.kernels.triton import packed
from dovetail_backends.kernels.triton.packed_few import few
from dovetail_backends.kernels.triton.packed_halves import by_halves
from dovetail_backends.kernels.triton.packed_pairs import by_pairs
from dovetail_backends.kernels.triton.packed_weight import PackedWeight
from dovetail_backends.kernels.triton.packed_wide import wide

MULTIPROCESSORS, CLOCK = 132, 1755.0
"""Of an H200; MHz."""
MEMORY = {"H200": 4.8e6, "H100": 3.35e6}
"""Bytes a microsecond."""
CACHE, CACHE_ALONE = 27.0, 64.0
"""Bytes a clock that each multiprocessor gets from the second-level cache, see `packed_wide`, and one of them alone."""
LEAST_IN_FLIGHT = {name: rate * 0.8 / MULTIPROCESSORS / 1024 for name, rate in MEMORY.items()}
"""KiB a multiprocessor, where a load takes 0.8 microseconds."""
PRODUCTS = {"bfloat16": 2048, "float8": 4096}
"""Of a multiprocessor in a clock."""
KINDS, ROWS = ("fp8-rows", "fp8-blocks", "int4"), (64, 256)
Way = tuple[str, Any]
"""A kernel and its tile."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a kernel that multiplies, as the module says; times in microseconds."""

    kernel: str
    tile: str
    registers: int
    local: int
    shared: int
    held: int
    programs: int
    each: float
    in_flight: float
    how: str
    memory: float
    cache: float
    tensor: float
    issue: float
    sums: float
    beside: tuple[str, ...]

    @property
    def least(self) -> float:
        """What the kernel takes at least."""
        return max(self.memory, self.cache, self.tensor, self.issue) + self.sums

    def __str__(self) -> str:
        waves = self.programs / MULTIPROCESSORS / self.held
        return (
            f"{self.kernel:14} {self.tile:22} {self.registers:3} registers {self.local:2} B local {self.shared:3} KiB "
            f"{self.held} of {self.programs:3} ({waves:4.2f}) {self.each:4.2f} {self.in_flight:3.0f} KiB {self.how} | "
            f"{self.memory:5.1f} {self.cache:5.1f} {self.tensor:5.1f} {self.issue:5.1f} {self.sums:4.1f} "
            f"=> {self.least:5.1f} | {' '.join(self.beside)}"
        )


def counted(run: Callable[[], Any], weight: PackedWeight) -> Counts | None:
    """Count the kernel of `run` that multiplies; None: it is the library's."""
    launches = sass.launched(run)
    at = next((at for at, one in enumerate(launches) if "BLOCK_K" in one.given), None)
    if at is None:
        return None
    kernel, (tall, tiles, splits), given = launches[at]
    found = sass.report(kernel)
    beside = tuple(one.kernel.metadata.name for place, one in enumerate(launches) if place != at)
    doubled = bool(given.get("GATE"))
    rows, outputs, depth = given["BLOCK_M"], given["BLOCK_N"] * (1 + doubled), given["BLOCK_K"]
    is_float8, steps, stages = "high" in kernel.src.fn.arg_names, -(-given["SPAN"] // depth), given["STAGES"]
    programs = tall * tiles * splits
    turns = -(-programs // MULTIPROCESSORS)
    of_weights = outputs * depth * (1.0 if weight.kind == "scaled" else 0.5)
    part = outputs * rows * 4.0 if splits > 1 else 0.0
    clocks = turns * (steps * (of_weights + 2 * rows * depth) + part) / CACHE
    tensor = turns * steps * outputs * depth * rows * (1 + is_float8) / PRODUCTS["float8" if is_float8 else "bfloat16"]
    issue = turns * steps * found.length * found.warps / 4
    alone = splits * part / CACHE_ALONE  # one program of each tile adds up, or another kernel on all multiprocessors
    sums = programs * part / MULTIPROCESSORS / CACHE if "add_kernel" in beside else alone
    lines = [line for _, line in sass.listing(kernel)]
    copies = max((int(bits) // 8 for line in lines for bits in re.findall(r"LDGSTS\S*?\.(128|64)\b", line)), default=4)
    loads = "TMA" if any("UTMALDG" in line for line in lines) else f"cp.async {copies}"
    reads = any(re.search(r"[HQ]GMMA\S* R\d+, R\d+", line) for line in lines)
    mma = next(iter(found.mma), "no tensor cores").split(".F32")[0]
    return Counts(
        found.name,
        f"{rows}x{given['BLOCK_N']}{'x2' if doubled else ''}x{depth} w{found.warps} s{stages} /{splits}",
        found.registers, found.local, found.shared >> 10, found.programs, programs,
        found.length * 32 * found.warps / (outputs * depth),
        min(found.programs, turns) * (stages - 1) * of_weights / 1024,
        f"{loads}, {mma} from {'registers' if reads else 'shared'}",
        weight.num_bytes / MEMORY["H200"], clocks / CLOCK, tensor / CLOCK, issue / CLOCK, sums / CLOCK, beside,
    )  # fmt: skip


def launcher(site: Site, weight: PackedWeight, rows: int, way: Way) -> Callable[[], Any]:
    """As a layer launches a site's product (`auto`), or with a tile; by `wide`, norm and gate are kernels beside it."""
    name, tile = way
    x, norm = empty(rows, site.k), empty(site.k) if site.norm else None
    residual, act = empty(rows, site.n) if site.residual else None, "silu_and_mul" if site.gate else None
    around: dict[str, Any] = {"act": act, "residual": residual}
    if name == "auto":
        rms = None if norm is None else RMSScale(norm, 1e-6)
        return lambda: packed.linear(x, weight, None, norm=rms, **around)
    if name == "wide":
        return lambda: wide(x, weight, None, tile, residual=residual)
    if name == "few":
        return lambda: few(x, weight, None, tile, **around)
    if name == "halves":
        return lambda: by_halves(x, weight, None, tile, norm=norm, eps=1e-6, **around)
    return lambda: by_pairs(x, weight, None, tile, norm=norm, eps=1e-6, **around)


def few_rows_ways(site: Site, weight: PackedWeight) -> list[Way]:
    """Candidates for 64 rows, of which counts say that they may be faster than what layers use."""
    if weight.kind == "scaled":
        if site.gate:
            tiles = [(128, 128, 8, 4, 1), (64, 128, 4, 3, 1)]
        else:
            splits = packed.halves_tile(weight, 64, gate=False)[1][4]
            tiles = [(128, 128, 8, 4, splits), (64, 128, 4, 3, 4), (64, 128, 4, 4, 4), (128, 128, 8, 3, 2 * splits)]
        return [("halves", (64, tile)) for tile in tiles]
    tile = packed.wide_tile(weight, 64)
    if tile is None:
        tiles = [(128, 128, 8, 3, 8), (128, 128, 8, 5, 4), (256, 64, 8, 4, 8), (256, 128, 8, 3, 8)]
        return [("few", (64, (128, 128, 8, 6, 4))), *(("wide", (64, one)) for one in tiles)]
    splits = tile[1][4]
    tiles = [(256, 64, 8, 4, 2 if splits == 1 else 4), (256, 128, 8, 4, 1 if splits == 1 else 4)]
    if splits > 1:  # no more than a device holds at a time
        tiles += [(128, 128, 8, 3, splits - 1), (128, 128, 8, 4, 4)]
    ways: list[Way] = [("wide", (64, one)) for one in tiles]
    return [*ways, ("few", (64, (128, 128, 8, 4, 1)))] if site.gate else ways


def many_rows_ways(site: Site, weight: PackedWeight) -> list[Way]:
    """Likewise for 256 rows."""
    if weight.kind == "scaled":
        tile = packed.pairs_tile(weight, 256, gate=site.gate)
        return [("pairs", tile), *([("stacked", None)] if weight.groups == 0 else []), ("many", None)]
    tile = packed.wide_tile(weight, 256)
    assert tile is not None
    splits = tile[1][4]
    tiles = [(128, 128, 8, 4, splits), (128, 64, 8, 4, splits), (256, 64, 8, 4, splits), (256, 128, 8, 4, splits)]
    return [*(("wide", (128, one)) for one in tiles), ("many", None)]


def ways_of(site: Site, weight: PackedWeight, rows: int) -> list[Way]:
    """What is measured for a number of rows: what layers use, and candidates."""
    return [("auto", None), *(few_rows_ways if rows <= 64 else many_rows_ways)(site, weight)]


def main() -> None:
    """Print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--sites", nargs="*", default=[site.name for site in SITES])
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    print("KiB in flight that memory wants: " + ", ".join(f"{k} {v:.0f}" for k, v in LEAST_IN_FLIGHT.items()))
    for kind in args.kinds:
        for site in (site for site in SITES if site.name in args.sites):
            weight = weight_of(kind, site.n, site.k)
            for rows in args.rows:
                for way in ways_of(site, weight, rows)[: None if args.all else 1]:
                    of_library = way[0] in ("stacked", "many")
                    found = None if of_library else counted(launcher(site, weight, rows, way), weight)
                    name = way[0] if not way[2] else f"{way[0]}+{way[2]}"
                    print(f"{kind:10} {site.name:4} {rows:3} {name:11} {found or 'the library multiplies'}", flush=True)


if __name__ == "__main__":
    main()
