"""How far kernels of packed weights are from their floors, and which candidate is the nearest: one table.

    python tests/benchmarks/packed_floors.py [--seconds 200] [--experts-only | --dense-only]

Needs a GPU. gpt-oss-20b's experts in mxfp4 for 16 and 64 tokens, with the usual tiles, others, and those on the
float8 tensor cores; then the four products of a layer of Llama-3.1-8B for 64 and 256 rows in bfloat16, fp8 and int4.
A floor is the time in which what is read would be copied at the rate of this card, or the time of as many
multiplications in a large product of bfloat16, half of it for fp8, if that is longer; both rates are measured first.
Experts' candidates are those of `quant_experts.py`, compiled where they are first launched. Dense ones are those of
`packed_counts.py`, compiled and compared by a process for each weight before. A share of the time bounds each row:
`--dense-only --seconds 100` decides the dense ones.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import packed_counts
import quant_experts
import torch
from mixers import copy_rate
from quant_products import CACHE_BYTES, FORMS, SITES, Around, Site, drawn, graph_us, relative
from triton.runtime.errors import OutOfResources

from dovetail_backends.kernels.triton.packed_experts import ExpertTiles, packed_gated_experts

TOKENS, ROWS = (16, 64), (64, 256)
KINDS = ("fp8-rounded-rows", "fp8-rounded-blocks", "int4")
FLOAT8 = [
    ExpertTiles(16, gate, down, is_float8=True)
    for gate, down in (
        ((64, 128, 4, 4), (64, 256, 4, 4)),
        ((64, 128, 4, 4), (64, 128, 4, 4)),
        ((64, 256, 4, 3), (64, 256, 4, 3)),
        ((128, 128, 8, 4), (128, 128, 8, 4)),
        ((128, 128, 4, 3), (128, 128, 4, 4)),
        ((64, 128, 4, 5), (64, 512, 4, 3)),
    )
]
"""None spills for sm_90. The first tile of each half has the most programs, and the fewest instructions among these."""
MOST_ERROR = 0.08
"""Rows rounded to float8 lose half of that."""
Timed = tuple[float, Any]


def timed(ways: Iterable[Any], run: Callable[[Any], Any], seconds: float) -> list[Timed]:
    """Microseconds of each way, of the first at least, until the time is over; those that do not fit are left out."""
    until, found = time.perf_counter() + seconds, list[Timed]()
    for way in ways:
        if found and time.perf_counter() > until:
            break
        try:
            found.append((graph_us(partial(run, way)), way))
        except OutOfResources:
            continue
    return found


def row(name: str, found: list[Timed], floor: float, note: str) -> str:
    """A line of the table."""
    (usual, _), (best, way) = found[0], min(found, key=lambda one: one[0])
    shares = f"{usual:8.1f} {floor / usual:5.0%} {best:8.1f} {floor / best:5.0%}"
    return f"{name:28} {floor:7.1f} {shares}  {note} {len(found):2} {way}"


def expert_rows(rate: float, seconds: float) -> Iterator[str]:
    """gpt-oss-20b's experts: usual, then the best of the float8 ones, then the best of all."""
    name = "gpt-oss-20b"
    layers = quant_experts.layers_of(name, 2)
    size = layers[0].gate_up.num_bytes + layers[0].down.num_bytes
    for tokens in TOKENS:
        x, ids, shares = quant_experts.drawn_tokens(name, tokens, quant_experts.DRAWS)

        def run(way: Any, x: Any = x, ids: Any = ids, shares: Any = shares) -> None:
            for at, one in enumerate(ids):
                packed_gated_experts(x, one, shares, layers[at % 2], x, **way)

        read = sum(len(one.unique()) for one in ids) / len(layers[0].gate_up.numbers) * size
        of_float8 = [{"is_few": False, "is_written": False, "tiles": one} for one in FLOAT8]
        usual, *others = quant_experts.ways(layers[0], "mxfp4", ids[0].numel())
        found = timed([usual, *of_float8], run, seconds / 3)
        each = [(took / len(ids), way) for took, way in found]
        want = packed_gated_experts(x, ids[0], shares, layers[0], x)
        got = packed_gated_experts(x, ids[0], shares, layers[0], x, **of_float8[0])
        note = f"error {relative(got - x, want - x):.0e}"
        yield row(f"experts {tokens}, float8", each, read / len(ids) / rate * 1e6, note)
        rest = [(took / len(ids), way) for took, way in timed([usual, *others], run, seconds / 6)]
        yield row(f"experts {tokens}, others", rest, read / len(ids) / rate * 1e6, " " * len(note))


def product_rate() -> float:
    """Multiplications a second of a large product in bfloat16."""
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 8192**3 / graph_us(lambda: x @ y) * 1e6


def ways_of(site: Site, weight: Any, rows: int) -> list[Any]:
    """As layers do, then candidates."""
    ways: list[Any] = packed_counts.ways_of(site, weight, rows)
    return [*ways, ("rounded", None)] if rows <= 64 and weight.rounds else ways


def compile_weight(index: int) -> None:
    """Run every way of one kind and site once, and compare it with what layers use."""
    kind, site = KINDS[index // len(SITES)], SITES[index % len(SITES)]
    weight = drawn(FORMS[kind], site.n, site.k)
    for rows in ROWS:
        around, (usual, *others) = Around(site, rows), ways_of(site, weight, rows)
        want = around.packed(weight, usual)
        for way in others:
            try:
                error = relative(around.packed(weight, way), want)
            except OutOfResources:
                continue
            if not error < MOST_ERROR:
                print(f"WRONG: {kind} {site.name} {rows} {way}: error {error:.1e}", flush=True)
    torch.cuda.synchronize()


def compile_all(seconds: float) -> None:
    """Compile for each kind and site in a process of its own; what is not done by then is compiled when it is timed."""
    until = time.perf_counter() + seconds
    indices = range(len(KINDS) * len(SITES))
    started = [subprocess.Popen([sys.executable, __file__, "--compile", str(index)]) for index in indices]
    for process in started:
        try:
            process.wait(max(0.1, until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def plain_rows(rates: tuple[float, float], floors: dict[tuple[str, int], float], seconds: float) -> Iterator[str]:
    """A layer's products in bfloat16, of which `floors` gets the time of each."""
    for site in SITES:
        size = site.n * site.k * 2
        some = [
            torch.randn(site.n, site.k, device="cuda", dtype=torch.bfloat16) for _ in range(1 + CACHE_BYTES // size)
        ]
        for rows in ROWS:
            around = Around(site, rows)
            found = timed(["as layers"], lambda _, a=around, c=some: [a.plain(one) for one in c], seconds)  # type: ignore[misc]
            found = [(took / len(some), way) for took, way in found]
            floors[site.name, rows] = found[0][0]
            floor = max(size / rates[0], site.n * site.k * rows / rates[1]) * 1e6
            yield row(f"bf16 {site.name} {rows}", found, floor, "")


def dense_rows(rates: tuple[float, float], until: float) -> Iterator[str]:
    """A layer's products in each kind beside those in bfloat16, and the sums of both."""
    plain: dict[tuple[str, int], float] = {}
    yield from plain_rows(rates, plain, 1.0)
    left = len(KINDS) * len(SITES) * len(ROWS)
    for kind in KINDS:
        sums = {rows: [0.0, 0.0] for rows in ROWS}
        for site in SITES:
            first = drawn(FORMS[kind], site.n, site.k)
            copies = [first, *(drawn(FORMS[kind], site.n, site.k) for _ in range(CACHE_BYTES // first.num_bytes))]
            for rows in ROWS:
                around, each = Around(site, rows), max(0.0, until - time.perf_counter()) / left
                run = lambda way, a=around, c=copies: [a.packed(one, way) for one in c]  # noqa: E731
                found = [(us / len(copies), way) for us, way in timed(ways_of(site, first, rows), run, each)]
                left -= 1
                fastest = min(took for took, _ in found)
                sums[rows] = [sums[rows][0] + found[0][0], sums[rows][1] + fastest]
                multiplied = site.n * site.k * rows / rates[1] / (1 + (first.kind == "scaled"))
                floor = max(first.num_bytes / rates[0], multiplied) * 1e6
                yield row(f"{kind} {site.name} {rows}", found, floor, f"x {plain[site.name, rows] / fastest:4.2f}")
                found.sort(key=lambda one: one[0])
                yield "    " + ", ".join(f"{took:.1f} {way[0]} {way[1]}" for took, way in found[:4])
        for rows in ROWS:
            total = sum(plain[site.name, rows] for site in SITES)
            usual, best = (f"{took:.1f} us (x {total / took:.2f})" for took in sums[rows])
            yield f"{kind} layer, {rows} rows: bf16 {total:.1f} us, usual {usual}, best {best}"


def main() -> None:
    """Measure the copy rate, then print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--experts-only", action="store_true")
    parser.add_argument("--dense-only", action="store_true")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile is not None:
        return compile_weight(args.compile)
    until = time.perf_counter() + args.seconds
    rates = copy_rate() * 1e6, product_rate()  # a second
    both = f"copies at {rates[0] / 1e12:.2f} TB/s, multiplies at {2 * rates[1] / 1e12:.0f} TFLOP/s"
    print(f"{torch.cuda.get_device_name()}: {both}; microseconds", flush=True)
    print(f"{'':28} {'floor':>7} {'usual':>8} {'':5} {'best':>8}", flush=True)
    for line in () if args.dense_only else expert_rows(rates[0], args.seconds * (1 if args.experts_only else 0.4)):
        print(line, flush=True)
    if args.experts_only:
        return None
    compile_all((until - time.perf_counter()) / 2)
    for line in dense_rows(rates, until):
        print(line, flush=True)
    return None


if __name__ == "__main__":
    with torch.inference_mode():
        main()
