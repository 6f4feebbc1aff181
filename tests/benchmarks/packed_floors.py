"""How far kernels of packed weights are from their floors, and which candidate is the nearest: one table.

    python tests/benchmarks/packed_floors.py [--seconds 200] [--experts-only]

Needs a GPU. gpt-oss-20b's experts in mxfp4 for 16 and 64 tokens, with the usual tiles, others, and those on the float8
tensor cores; then the four products of a layer of Llama-3.1-8B for 64 rows in fp8, int4 and bfloat16. A floor is the
time in which what is read would be copied at the rate that this card copies at, measured first. Candidates are those of
`quant_experts.py` and `quant_products.py`, compiled where they are first launched; a share of the time bounds each row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import quant_experts
import quant_products
import torch
from quant_products import CACHE_BYTES, FORMS, SITES, Around, drawn, graph_us, relative
from triton.runtime.errors import OutOfResources

from dovetail_backends.kernels.triton.packed_experts import ExpertTiles, packed_gated_experts

TOKENS, ROWS = (16, 64), 64
KINDS = ("fp8-rows", "fp8-blocks", "int4")
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
Timed = tuple[float, Any]


def copy_rate() -> float:
    """Bytes a second that are read and written by a large copy."""
    given = torch.randint(0, 100, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(given)
    return 2 * given.numel() / graph_us(lambda: target.copy_(given)) * 1e6


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
    return f"{name:24} {floor:7.1f} {shares}  {note} {len(found):2} {way}"


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


def dense_rows(rate: float, seconds: float) -> Iterator[str]:
    """A layer's products in each kind beside those in bfloat16, and the sums of both."""
    each = seconds / len(SITES) / (len(KINDS) + 1)
    plain: dict[str, float] = {}
    for kind in ("bf16", *KINDS):
        sums = [0.0, 0.0]
        for site in SITES:
            around = Around(site, ROWS)
            make = partial(_plain if kind == "bf16" else drawn, FORMS.get(kind), site.n, site.k)  # type: ignore[operator]
            first = make()
            size = first.numel() * 2 if kind == "bf16" else first.num_bytes
            copies = [first, *(make() for _ in range(CACHE_BYTES // size))]
            if kind == "bf16":
                found = timed(["cuBLAS or ours"], lambda _, a=around, c=copies: [a.plain(one) for one in c], each)  # type: ignore[misc]
            else:
                ways = [("auto", None), *quant_products.candidates(FORMS[kind], site, ROWS, 12)]
                found = timed(ways, lambda way, a=around, c=copies: [a.packed(one, way) for one in c], each)  # type: ignore[misc]
            found = [(took / len(copies), way) for took, way in found]
            fastest = min(took for took, _ in found)
            sums = [sums[0] + found[0][0], sums[1] + fastest]
            plain.setdefault(site.name, fastest)
            yield row(f"{kind} {site.name}", found, size / rate * 1e6, f"x {plain[site.name] / fastest:4.2f}")
        total = sum(plain.values())
        usual, best = (f"{took:.1f} us (x {total / took:.2f})" for took in sums)
        yield f"{kind} layer: usual {usual}, best {best}"


def _plain(_: Any, n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    """Measure the copy rate, then print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--experts-only", action="store_true")
    args = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: copies at {rate / 1e12:.2f} TB/s; microseconds", flush=True)
    print(f"{'':24} {'floor':>7} {'usual':>8} {'':5} {'best':>8}", flush=True)
    for line in expert_rows(rate, args.seconds * (1 if args.experts_only else 0.4)):
        print(line, flush=True)
    for line in () if args.experts_only else dense_rows(rate, args.seconds * 0.6):
        print(line, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
