"""What kernels for packed weights and 8-bit caches are once compiled for an H200; needs no GPU.

    python tests/benchmarks/quant_compiled.py [--only "64 rows"] [--loops | --json]

For each kernel with the tile that layers use: registers, bytes of a thread's local memory, shared memory, programs that
a multiprocessor holds, instructions of the inner loop for each number that is taken apart, how many of them are slow
conversions (F2F, a quarter of the others' rate or less), and its matrix instructions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import sass
import torch
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail_backends.kernels.triton import fixed_packed, packed
from dovetail_backends.kernels.triton.fixed import TILE_M
from dovetail_backends.kernels.triton.packed_experts import expert_tiles, packed_gated_experts
from dovetail_backends.kernels.triton.packed_pairs import fits_pairs
from dovetail_backends.kernels.triton.packed_slots import PackedExpertWeights
from dovetail_backends.kernels.triton.packed_weight import PackedWeight
from dovetail_backends.triton.decode import DecodeScratch, choose_shape, decode_qkv
from dovetail_backends.triton.kv import Scales

Case = tuple[str, Callable[[], Any], int]
"""A name, a launcher, and numbers that the inner loop of its last large kernel takes apart in a round, or 0."""
FLOAT8 = torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def weight_of(kind: str, *shape: int) -> PackedWeight:
    """A weight `[N, K]`, or `[E, N, K]`, of a kind."""
    *lead, k = shape
    n = shape[-2]
    if kind in ("fp8-blocks", "fp8-rows", "int8"):
        numbers = empty(*shape, dtype=torch.int8 if kind == "int8" else FLOAT8)
        if kind == "fp8-blocks":
            return PackedWeight("scaled", numbers, empty(*lead, k // 128, dtype=torch.float32), None, None, 128, n, k)
        return PackedWeight("scaled", numbers, None, None, empty(*lead, dtype=torch.float32), 0, n, k)
    words, blocks = empty(*lead, -(-k // 64) * 8, dtype=torch.int32), -(-k // 64)
    if kind == "int4":
        return PackedWeight("int4", words, empty(*lead, k // 128), None, None, 128, n, k)
    rows = empty(*lead, dtype=torch.float32)
    return PackedWeight("mxfp4", words, empty(*lead, blocks, dtype=torch.int16), None, rows, 32, n, k)


def products() -> Iterator[Case]:
    """Products of an 8B model's layer."""
    for kind in ("fp8-blocks", "fp8-rows", "int8", "int4", "mxfp4"):
        for rows in (16, 64, 256):
            weight = weight_of(kind, 6144, 4096)
            x = empty(rows, 4096)
            if rows > 64 and fits_pairs(weight):
                _, (block_n, block_k, *_) = packed.pairs_tile(weight, rows, gate=False)
                yield (
                    f"{kind} {rows} rows",
                    lambda x=x, weight=weight: packed.linear(x, weight, None),
                    block_n * block_k,
                )
                continue
            if rows > 64:
                tile = packed.wide_tile(weight, rows)
            elif kind.startswith("fp8"):
                tile = packed.halves_tile(weight, rows, gate=False)
            else:
                tile = packed.few_tile(weight, rows, gate=False)
            assert tile is not None
            _, (block_n, block_k, _, _, _) = tile
            yield f"{kind} {rows} rows", lambda x=x, weight=weight: packed.linear(x, weight, None), block_n * block_k


def fixed() -> Iterator[Case]:
    """Products of `--batch-invariant`: splits of K in programs of their own, and in a loop of one program."""
    for kind in ("fp8-blocks", "int4", "mxfp4"):
        weight = weight_of(kind, 6144, 4096)
        _, (block_n, block_k, *_) = packed.few_tile(weight, TILE_M, gate=False)
        for rows in (64, 256):
            x = empty(rows, 4096)
            run = lambda x=x, weight=weight: fixed_packed.linear(x, weight, None)  # noqa: E731
            yield f"{kind} fixed {rows} rows", run, block_n * block_k


def gates() -> Iterator[Case]:
    """Gate and up of an 8B model: so many outputs that K is not split."""
    for kind, rows in (("int4", 64), ("int4", 128), ("mxfp4", 64), ("int8", 64)):
        weight, x = weight_of(kind, 28672, 4096), empty(rows, 4096)
        broad = packed.wide_tile(weight, rows) if kind != "int8" else None
        _, (block_n, block_k, *_) = broad or packed.few_tile(weight, rows, gate=False)
        run = lambda x=x, weight=weight: packed.linear(x, weight, None)  # noqa: E731
        yield f"{kind} gate {rows}", run, block_n * block_k


def experts() -> Iterator[Case]:
    """Layers of gpt-oss-20b and Qwen3-30B-A3B; the loop is of the gated half."""
    for name, kind, num, top_k, hidden, inner in (
        ("gpt-oss-20b", "mxfp4", 32, 4, 2880, 2880),
        ("Qwen3-30B-A3B", "fp8-blocks", 128, 8, 2048, 768),
    ):
        weights = PackedExpertWeights(
            weight_of(kind, num, 2 * inner, hidden), weight_of(kind, num, hidden, inner), None, None, 0,
            "silu_and_mul", False,
        )  # fmt: skip
        for tokens in (1, 64, 512, 1024):
            ids, shares = empty(tokens, top_k, dtype=torch.int64), empty(tokens, top_k)
            x = empty(tokens, hidden)
            block_n, block_k, _, _ = expert_tiles(weights, tokens * top_k).gate_up
            run = lambda x=x, ids=ids, shares=shares, weights=weights: packed_gated_experts(  # noqa: E731
                x, ids, shares, weights, None
            )
            yield f"{name} {tokens} tokens", run, 2 * block_n * block_k


def decodes() -> Iterator[Case]:
    """Attention of decode rows over a cache in bfloat16 and in 8 bits: 0.6B and 8B."""
    for name, num, hq, hk, d in (("0.6B", 256, 16, 8, 128), ("8B", 64, 32, 8, 128), ("0.5B", 256, 14, 2, 64)):
        for dtype in (torch.bfloat16, FLOAT8, torch.int8):
            pages, page = 64, 16
            kv = empty(pages, 2, page, hk, d, dtype=dtype if dtype == torch.bfloat16 else torch.int8)
            k_scale, v_scale = empty(pages, page, hk), empty(pages, page, hk)
            scales = None if dtype == torch.bfloat16 else Scales(k_scale, v_scale, dtype)
            longs = {at: empty(num, dtype=torch.int64) for at in ("positions", "kv_slots", "rows", "seq_lens")}
            batch = ForwardBatch(
                num_decode=num, page_table=empty(num, 64, dtype=torch.int32), last_tokens=longs["rows"],
                q_starts=empty(num + 1, dtype=torch.int32), seq_lens_cpu=[], q_lens_cpu=[], attention=None, **longs,
            )  # type: ignore[arg-type]  # fmt: skip
            layer = AttentionLayer(index=0, num_qo_heads=hq, num_kv_heads=hk, qk_dim=d, v_dim=d, scale=d**-0.5)
            scratch = DecodeScratch(hq, hk, d, torch.device("meta"))
            norm, rope = (empty(hq + hk, d), 1e-6), (empty(num, 1, d), empty(num, 1, d))
            arguments = (
                empty(num, hq + 2 * hk, d),
                norm,
                rope,
                (kv[:, 0], kv[:, 1]),
                layer,
                batch,
                scratch,
                empty(num, hq, d),
            )
            shape = choose_shape(num, hk, d)
            cache = str(dtype).removeprefix("torch.")
            yield (
                f"{name} decode {num}, {cache}",
                lambda arguments=arguments, scales=scales: decode_qkv(*arguments, scales=scales),
                2 * shape.block_n * d,
            )


def measured(case: Case) -> dict[str, Any]:
    """Report of a case's kernel that has the longest loop of those with matrix instructions."""
    name, run, numbers = case
    reports = [sass.report(kernel) for kernel in sass.compiled(run)]
    found = max(reports, key=lambda one: (sum(one.mma.values()), one.length))
    each = numbers / (32 * found.warps)
    return {
        "case": name, "kernel": found.name, "registers": found.registers, "local": found.local,
        "shared": found.shared, "programs": found.programs, "loop": found.length, "each": round(found.length / each, 2),
        "slow": found.names.get("F2F", 0), "pending": found.pending,
        "mma": found.mma, "kinds": found.loop, "names": found.names,
    }  # fmt: skip


def main() -> None:
    """Print a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names, any of which is enough")
    parser.add_argument("--loops", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for case in (*products(), *fixed(), *gates(), *experts(), *decodes()):
        if not any(part in case[0] for part in args.only):
            continue
        one = measured(case)
        if args.json:
            print(json.dumps(one), flush=True)
            continue
        mma = ", ".join(f"{num} {name}" for name, num in one["mma"].items())
        print(
            f"{one['case']}: {one['kernel']} {one['registers']} registers, {one['local']} B local, "
            f"{one['shared'] >> 10} KiB, {one['programs']} programs; loop {one['loop']}, {one['each']} a number, "
            f"{one['slow']} F2F; {mma}",
            flush=True,
        )
        if args.loops:
            print("   ", {kind: num for kind, num in one["kinds"].items() if num}, flush=True)
            print("   ", dict(sorted(one["names"].items(), key=lambda item: -item[1])), flush=True)


if __name__ == "__main__":
    main()
