"""Which tiles are fastest for products with packed weights, and how far from the bandwidth they are.

    python tests/benchmarks/quant_products.py [--kinds fp8-blocks int4 …] [--rows 1 16 …] [--many 128 …] [--seconds 60]

Needs a GPU. First the kinds are compared with their reference at odd sizes. Then each candidate runs in a CUDA graph
over as many copies of a weight as the L2 cache cannot hold. Printed: microseconds of plain bfloat16 weights and of the
fastest candidates, and for the first of these the share of the copy bandwidth and the error against the written-out
weight. Candidates are compiled before, by several processes.
"""

from __future__ import annotations

import argparse
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from expert_tiles import BANDWIDTH, graph_us
from torch import Tensor
from triton.runtime.errors import OutOfResources

from dovetail.contracts.layers import RMSScale
from dovetail.sdk.layers.ops import reference
from dovetail.sdk.quantization.forms import Form, Int4, Mxfp4, Scaled
from dovetail.sdk.quantization.words import nibbles_of
from dovetail_backends.kernels.triton import norms, packed_weight, products
from dovetail_backends.kernels.triton.packed import linear as packed_linear
from dovetail_backends.kernels.triton.packed_few import few
from dovetail_backends.kernels.triton.packed_halves import by_halves, fits_halves
from dovetail_backends.kernels.triton.packed_integers import by_integers, fits_integers
from dovetail_backends.kernels.triton.packed_pairs import by_pairs, fits_pairs
from dovetail_backends.kernels.triton.packed_rounded import by_rounded
from dovetail_backends.kernels.triton.packed_row import row
from dovetail_backends.kernels.triton.packed_stacked import by_stacked, fits_stacked
from dovetail_backends.kernels.triton.packed_weight import PackedWeight
from dovetail_backends.kernels.triton.packed_wide import fits_wide, wide
from dovetail_backends.kernels.triton.packed_write import many, written

FORMS: dict[str, Form] = {
    "fp8-blocks": Scaled(torch.float8_e4m3fn, 128),
    "fp8-rows": Scaled(torch.float8_e4m3fn),
    "fp8-rounded-rows": Scaled(torch.float8_e4m3fn, activations=torch.float8_e4m3fn),
    "fp8-rounded-blocks": Scaled(torch.float8_e4m3fn, 128, torch.float8_e4m3fn),
    "fp8-32": Scaled(torch.float8_e4m3fn, 32),
    "int8": Scaled(),
    "int4": Int4(128),
    "int4-zero": Int4(128, has_zero=True),
    "int4-32-zero": Int4(32, has_zero=True),
    "mxfp4": Mxfp4(),
}
CACHE_BYTES = 150 << 20
CHECKED = ((74, 640), (1000, 1152), (300, 4096))
"""Outputs and inputs of the weights that are compared with their reference."""
PROCESSES = 12


@dataclass(frozen=True, slots=True)
class Site:
    """A product of a model's layer: outputs, inputs and what the kernel does around it."""

    name: str
    n: int
    k: int
    norm: bool = False
    gate: bool = False
    residual: bool = False


SITES = (
    Site("qkv", 6144, 4096, norm=True),
    Site("out", 4096, 4096, residual=True),
    Site("gate", 28672, 4096, norm=True, gate=True),
    Site("down", 4096, 14336, residual=True),
)
"""Of Llama-3.1-8B."""


def packed(form: Form, weight: Tensor) -> tuple[PackedWeight, Tensor]:
    """Quantise a weight; returns it packed, and what that stands for in float32."""
    made = form.quantise(weight)
    want = form.dequantise(made, torch.float32)
    scale = made["weight_scale"]
    if isinstance(form, Scaled):
        return packed_weight.scaled(made["weight"], scale, form.group), want
    if isinstance(form, Int4):
        nibbles = nibbles_of(made["weight_packed"])
        return packed_weight.int4(nibbles, scale, made.get("weight_zero"), form.group, torch.bfloat16), want
    both = torch.stack((made["weight_packed"] & 15, made["weight_packed"] >> 4), -1).flatten(-2)
    return packed_weight.mxfp4(both, scale), want


def drawn(form: Form, n: int, k: int) -> PackedWeight:
    """Random numbers in a form: fast, and as costly to multiply as a model's."""
    if isinstance(form, Scaled):
        numbers = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        whole = (numbers * 20).round().to(torch.int8) if form.dtype == torch.int8 else numbers.to(form.dtype)
        scale = torch.rand(-(-n // 128), -(-k // (form.group or k)), device="cuda") / 100
        scale = scale.repeat_interleave(128, dim=0)[:n].contiguous()
        return packed_weight.weight_of(form, {"weight": whole, "weight_scale": scale}, torch.bfloat16)
    nibbles = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
    if isinstance(form, Int4):
        scale = torch.rand(n, -(-k // (form.group or k)), device="cuda") / 100
        zero = torch.full_like(scale, 7, dtype=torch.uint8) if form.has_zero else None
        return packed_weight.int4(nibbles, scale, zero, form.group, torch.bfloat16)
    return packed_weight.mxfp4(nibbles, torch.randint(110, 122, (n, k // 32), device="cuda", dtype=torch.uint8))


class Around:
    """What stands around a site's product, for some rows."""

    def __init__(self, site: Site, rows: int) -> None:
        self.site, self.rows = site, rows
        self.x = torch.randn(rows, site.k, device="cuda", dtype=torch.bfloat16)
        self.norm = torch.randn(site.k, device="cuda", dtype=torch.bfloat16) if site.norm else None
        self.residual = torch.randn(rows, site.n, device="cuda", dtype=torch.bfloat16) if site.residual else None
        self.options: dict[str, Any] = {"norm": self.norm, "eps": 1e-6, "residual": self.residual}
        self.options["act"] = "silu_and_mul" if site.gate else None

    def packed(self, weight: PackedWeight, tile: Any) -> Tensor:
        """By a kernel with a tile; by a library, or as layers do (`auto`)."""
        way, numbers = tile
        if way == "auto":
            norm = None if self.norm is None else RMSScale(self.norm, 1e-6)
            act: Any = self.options["act"]
            return packed_linear(self.x, weight, None, norm=norm, act=act, residual=self.residual)
        if way == "wide":
            return self.apart(partial(wide, weight=weight, bias=None, tile=numbers))
        if way in ("stacked", "rounded"):
            return (by_stacked if way == "stacked" else by_rounded)(self.x, weight, None, **self.options)
        if way == "few":  # behind a norm of its own, as in layers
            x = self.x if self.norm is None else norms.rms_norm(self.x, self.norm, 1e-6)
            return few(x, weight, None, numbers, **self.options | {"norm": None})
        if way != "many":
            run: Any = {"row": row, "halves": by_halves, "integers": by_integers, "pairs": by_pairs}[way]
            return run(self.x, weight, None, numbers, **self.options)  # type: ignore[no-any-return]
        return self.apart(
            lambda x, residual: many(x, weight, None) if residual is None else residual + many(x, weight, None)
        )

    def apart(self, product: Callable[..., Tensor]) -> Tensor:
        """A product with the norm before it and the gate behind it in kernels of their own."""
        x = self.x if self.norm is None else norms.rms_norm(self.x, self.norm, 1e-6)
        y = product(x, residual=self.residual)
        return norms.silu_and_mul(y) if self.site.gate else y

    def plain(self, weight: Tensor, ops: Any = products) -> Tensor:
        """With a weight in bfloat16."""
        if self.norm is not None:
            product = ops.norm_gate if self.site.gate else ops.norm_linear
            return product(self.x, self.norm, 1e-6, weight, None)  # type: ignore[no-any-return]
        return ops.linear_add(self.x, weight, None, self.residual.clone())  # type: ignore[no-any-return,union-attr]


def relative(found: Tensor, want: Tensor) -> float:
    """Relative error of the whole tensor."""
    return float((found.double() - want.double()).norm() / want.double().norm())


def check(kind: str) -> None:
    """Compare a kind with its reference, at sizes off the tiles, with zero and extreme scales."""
    form, worst = FORMS[kind], 0.0
    for n, k in CHECKED:
        weight = torch.randn(n, k, device="cuda") * torch.logspace(-9, 2, n, device="cuda")[:, None]
        weight[3] = 0
        made, want = packed(form, weight)
        want = want.to(torch.bfloat16).float()
        usual = want.norm(dim=1).clamp_min(1e-30)
        errors = [relative(written(made, torch.bfloat16).float() / usual[:, None], want / usual[:, None])]
        for rows, tile in itertools.product((1, 2, 17, 64, 130), ((32, 256), (64, 128))):
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            right = x.float() @ want.t() / usual
            torch.cuda.synchronize()  # weights are loaded before a kernel waits for what was launched before it
            block_m, splits = (16, 3) if rows < 17 else (64, 1)
            found = [few(x, made, None, (block_m, (*tile, 4, 3, splits)))]
            if rows == 1 and made.kind == "scaled":
                found.append(row(x, made, None, (4, 512, 4)))
            if fits_integers(made) and rows <= 17:
                found.append(by_integers(x, made, None, (4, 1024, 4)))
            if fits_wide(made):
                found.append(wide(x, made, None, (64, (*tile[:1], 64, 4, 3, splits))))
            if fits_pairs(made):
                found.append(by_pairs(x, made, None, (block_m, (64, 128, 4, 3, splits))))
            if fits_stacked(made) and rows > 17:
                found.append(by_stacked(x, made, None))
            if fits_halves(made):
                found.append(by_halves(x, made, None, (block_m, (64, 128, 4, 3, splits))))
            errors += [relative(y.float() / usual, right) for y in found]
        worst = max(worst, *(error if error == error else float("inf") for error in errors))
    print(f"check {kind}: relative error {worst:.1e} {'ok' if worst < 8e-3 else 'WRONG'}", flush=True)


def candidates(form: Form, site: Site, rows: int, most: int) -> list[Any]:
    """Tiles that may be good for a number of rows; up to 64 a fixed random choice."""
    found: list[Any] = []
    if rows > 64:
        return [("auto", None), *many_candidates(form, site, rows)]
    is_words = not isinstance(form, Scaled)
    if rows == 1 and not is_words:
        for block_n, block_k, warps in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)):
            if 16 <= block_n * block_k * (1 + site.gate) // (32 * warps) <= 128:
                found.append(("row", (block_n, block_k, warps)))
    elif rows <= 4 and isinstance(form, Int4) and form.group == 128:
        for block_n, block_k, warps in itertools.product((2, 4, 8, 16), (1024, 2048, 4096), (2, 4, 8)):
            if 64 <= block_n * block_k * (1 + site.gate) // (32 * warps) <= 512:
                found.append(("integers", (block_n, block_k, warps)))
    elif isinstance(form, Scaled) and form.dtype == torch.float8_e4m3fn:
        found = list(halves_candidates(site, rows))
    else:
        depths = (256, 512, 1024) if is_words else (64, 128) if form.group == 128 else (128, 256)  # type: ignore[attr-defined]
        n = site.n // 2 if site.gate else site.n
        splits = (1,) if site.norm or site.gate else (1, 2, 4, 8)
        block_ms = (16,) if rows <= 16 else (32,) if rows <= 32 else (64,)
        for block_m, block_n, block_k, warps, stages, parts in itertools.product(
            block_ms, (16, 32, 64, 128), depths, (4, 8), (3, 4, 6), splits
        ):
            programs = -(-n // block_n) * parts
            shared = (
                block_n * block_k * (1 + site.gate) * stages // (2 if is_words else 1) + block_m * block_k * 2 * stages
            )
            if shared > 200 << 10 or not 96 <= programs <= 2100 or (block_n == 64 and warps == 8):
                continue
            if (warps == 8) != (block_n == 128 and block_m >= 64) and warps == 8:
                continue
            if block_n * block_m * (1 + site.gate) > 8192 * warps // 4 * 2 or block_n * block_k < 4096:
                continue
            found.append(("few", (block_m, (block_n, block_k, warps, stages, parts))))
    random.Random(f"{site}/{rows}").shuffle(found)
    broad = list(wide_candidates(site, rows)) if rows > 4 and (is_words or getattr(form, "group", 0) == 128) else []
    random.Random(f"{site}/{rows}").shuffle(broad)
    return [("auto", None), *found[:most], *broad[: 4 * most]]


WIDE = {
    16: ((64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 4), (256, 64, 8, 4), (256, 128, 8, 3), (64, 256, 4, 3)),
    32: ((64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3), (256, 64, 8, 4), (256, 128, 8, 3)),
    64: ((128, 64, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4), (256, 128, 8, 3)),
}
"""BLOCK_N, BLOCK_K, warps and stages by BLOCK_M."""


def wide_candidates(site: Site, rows: int) -> Iterator[Any]:
    """Tiles of `wide` for up to 64 rows, with as many programs as the device holds at a time, or half as many."""
    block_m = next(size for size in WIDE if rows <= size)
    for block_n, block_k, warps, stages in WIDE[block_m]:
        for splits in (1, 2, 3, 4, 5, 6, 8):
            programs = -(-site.n // block_n) * splits
            if 60 <= programs * warps // 4 <= 1100 and splits * 4 * block_k <= site.k:
                yield "wide", (block_m, (block_n, block_k, warps, stages, splits))


def many_candidates(form: Form, site: Site, rows: int) -> Iterator[Any]:
    """Tiles for more than 64 rows, as far as they fit a form."""
    is_float8 = isinstance(form, Scaled) and form.dtype == torch.float8_e4m3fn
    group = getattr(form, "group", None) or 128
    n = site.n // 2 if site.gate else site.n
    if is_float8 and group % 128 == 0:
        for block_m, (block_n, warps, stages) in PAIRS:
            for splits in (1,) if site.gate else split_ways(-(-n // block_n) * -(-rows // block_m), site.k // 128):
                yield "pairs", (block_m, (block_n, 128, warps, stages, splits))
    if isinstance(form, Scaled) and not form.group and is_float8:
        yield "stacked", None
    if group % 64 == 0 or isinstance(form, Mxfp4):
        for splits in split_ways(-(-site.n // 256) * -(-rows // 128), site.k // 128):
            yield "wide", (128, (256, 128 if group % 128 == 0 else 64, 8, 3, splits))
    if rows > 128:
        yield "many", None


PAIRS = ((128, (128, 8, 3)), (128, (128, 8, 4)), (64, (64, 4, 3)))
"""BLOCK_M, BLOCK_N, warps, stages."""


def split_ways(programs: int, steps: int) -> list[int]:
    """By how many K is split: to fill the device once, and to leave the least of it idle."""
    once = max(1, min(132 // programs, 8, steps // 4))

    def idle(splits: int) -> float:
        return -(-programs * splits // 132) * 132 / (programs * splits)

    full = min((1, 2, 3, 4, 5, 6, 8), key=lambda one: (idle(one) > 1.15, one))
    return [splits for splits in sorted({1, once, full}) if splits in (once, full) and splits * 3 <= steps] or [1]


def halves_candidates(site: Site, rows: int) -> Iterator[Any]:
    """Tiles of `by_halves`."""
    n = site.n // 2 if site.gate else site.n
    block_ms = (16,) if rows <= 16 else (32,) if rows <= 32 else (64,)
    for block_m, (block_n, warps), stages, parts in itertools.product(
        block_ms, ((64, 4), (128, 4), (128, 8)), (3, 4, 5), (1,) if site.gate else (1, 2, 4, 8)
    ):
        programs = -(-n // block_n) * parts * -(-rows // block_m)
        shared = (block_n * (1 + site.gate) + 2 * block_m) * 128 * stages
        if shared <= 200 << 10 and 60 <= programs <= 1100 and block_n * block_m * (1 + site.gate) <= 4096 * warps:
            yield "halves", (block_m, (block_n, 128, warps, stages, parts))


def layer_us(run: Callable[[Any], Any], weights: list[Any]) -> float:
    """Microseconds of `run` for one weight."""
    return graph_us(lambda: [run(weight) for weight in weights]) / len(weights)


def work(args: argparse.Namespace) -> Iterator[tuple[str, Site, int, list[Any]]]:
    """Everything that is to be measured."""
    for kind in args.kinds:
        for site in SITES:
            for rows in (*args.rows, *args.many):
                yield kind, site, rows, candidates(FORMS[kind], site, rows, args.most)


def compile_share(args: argparse.Namespace) -> None:
    """Run each tile of one share once."""
    index, count = args.compile
    place, kept, known = 0, ("", Site("", 0, 0)), set()
    weight: Any = None
    for kind, site, rows, tiles in work(args):
        tiles = [tile for tile in tiles if tile[0] != "library"]
        tiles = [tile for tile in tiles if tile[0] == "auto" or (kind, site, tile) not in known]  # whatever the rows
        known |= {(kind, site, tile) for tile in tiles}
        mine = [tile for at, tile in enumerate(tiles, place) if at % count == index]
        place += len(tiles)
        if mine and kept != (kind, site):
            weight, kept = drawn(FORMS[kind], site.n, site.k), (kind, site)
        around = Around(site, rows) if mine else None
        for tile in mine:
            try:
                around.packed(weight, tile)  # type: ignore[union-attr]
            except OutOfResources:
                continue
    torch.cuda.synchronize()


def short(tile: Any) -> str:
    """A tile in few letters; `p128x128w8s3/2` is 128 rows by 128 outputs, eight warps, three stages, K halved."""
    way, numbers = tile
    if way == "pairs":
        block_m, (block_n, _, warps, stages, splits) = numbers
        return f"p{block_m}x{block_n}w{warps}s{stages}/{splits}"
    if way == "wide":
        return "wide{}x{}x{}w{}s{}/{}".format(numbers[0], *numbers[1])
    return way if numbers is None else f"{way} {numbers}".replace(" ", "")


def measure(args: argparse.Namespace) -> None:
    """Print a line for each site and number of rows."""
    until = time.perf_counter() + args.seconds
    print("kind site rows: plain us; us and tile of the fastest (share of the bandwidth, error)", flush=True)
    sums: dict[tuple[str, int], list[float]] = {}
    automatic: dict[tuple[str, int], list[float]] = {}
    weights: list[PackedWeight] = []
    kept: Any = None
    for kind, site, rows, tiles in work(args):
        if kept != (kind, site):
            weights = []
            first = drawn(FORMS[kind], site.n, site.k)
            weights = [first, *(drawn(FORMS[kind], site.n, site.k) for _ in range(CACHE_BYTES // first.num_bytes))]
            want = written(first, torch.bfloat16)
            plain = [want, *(want.clone() for _ in range(CACHE_BYTES // (2 * site.n * site.k)))]
            kept = (kind, site)
        around = Around(site, rows)
        times: list[tuple[float, Any]] = []
        for tile in tiles:
            if time.perf_counter() > until and times:
                break
            try:
                took = layer_us(partial(around.packed, tile=tile), weights)
            except OutOfResources:
                continue
            except RuntimeError:
                if tile[0] != "library":
                    raise
                continue
            times.append((took, tile))
        usual = layer_us(around.plain, plain)
        times.sort(key=lambda one: one[0])
        took, tile = next(one for one in times if one[1][0] != "library")
        error = relative(around.packed(first, tile), around.plain(want, reference))
        share = first.num_bytes / BANDWIDTH * 1e6 / took
        total = sums.setdefault((kind, rows), [0.0, 0.0])
        total[0], total[1] = total[0] + took, total[1] + usual
        auto = next((took for took, tile in times if tile[0] == "auto"), float("nan"))
        automatic.setdefault((kind, rows), []).append(auto)
        ways = ", ".join(f"{took:.1f} {short(tile)}" for took, tile in times[: 7 if rows > 64 else 3])
        print(f"{kind} {site.name} {rows}: plain {usual:.1f}; {ways} ({share:.0%}, {error:.0e})", flush=True)
    for (kind, rows), (mine, usual) in sums.items():
        auto = sum(automatic[kind, rows])
        print(f"layer {kind} {rows} rows: best {mine:.1f} us, auto {auto:.1f}, plain {usual:.1f}, {usual / auto:.2f} x")


def main() -> None:
    """Check, compile, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=["fp8-blocks", "fp8-rows", "int4"], choices=list(FORMS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 16, 64])
    parser.add_argument("--many", nargs="*", type=int, default=[128, 256])
    parser.add_argument("--most", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--compile", nargs=2, type=int)
    parser.add_argument("--check", choices=list(FORMS))
    args = parser.parse_args()
    if args.check:
        return check(args.check)
    if args.compile:
        return compile_share(args)
    begin = time.perf_counter()
    wanted = [["--check", kind] for kind in args.kinds]
    wanted += [["--compile", str(index), str(PROCESSES)] for index in range(PROCESSES)]
    started = [subprocess.Popen([sys.executable, *sys.argv, *one]) for one in wanted]
    codes = [process.wait() for process in started]
    print(f"compiled in {time.perf_counter() - begin:.0f} s {[code for code in codes if code]}", flush=True)
    return measure(args)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
