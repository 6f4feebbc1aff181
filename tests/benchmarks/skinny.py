"""Tunes the few-rows matrix kernel in whole decode steps: `python tests/benchmarks/skinny.py MODEL_FOLDER`.

Needs a GPU; weights are random. For each product of a layer in turn, every tile that may be good is put into a captured
step beside what is best for the other products, and so is cuBLAS. A tile is kept if the step is faster with it.
`--compile I OF` only compiles the tiles of one share, to do that in several processes before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from dovetail.contracts.config import ModelConfig
from dovetail.engine.core import EngineCore
from dovetail.messages.step import DecodeGraph
from dovetail.runtime.hf_config import read_config
from dovetail.sdk.layers.ops import reference
from dovetail_backends.kernels.triton import skinny
from dovetail_backends.kernels.triton.launch import Tile
from dovetail_models.llama import Llama
from dovetail_models.qwen2 import Qwen2
from dovetail_models.qwen3 import Qwen3
from dovetail_testing.engine import make_core

SHARED = 190 << 10
NUM_LAYERS = 6
"""Of the model whose steps are timed: enough that weights come from memory."""
MIN_PROGRAMS, MAX_PROGRAMS = 28, 2400


@dataclass(frozen=True, slots=True)
class Site:
    """A product of a step: its weight `[N, K]`, and what the kernel does around it."""

    name: str
    n: int
    k: int
    norm: bool = False
    gate: bool = False
    residual: bool = False
    bias: bool = False

    @property
    def table(self) -> skinny.Tiles:
        """Where its tiles stand."""
        return skinny.GATE_TILES if self.gate else skinny.TILES


def sites(config: ModelConfig) -> list[Site]:
    """The products of a layer of a dense model."""
    spec, hidden, inner = config.layers[0], config.hidden_size, config.intermediate_size
    heads = spec.num_qo_heads * spec.qk_dim
    qkv = heads + 2 * spec.num_kv_heads * spec.qk_dim
    return [
        Site("qkv", qkv, hidden, norm=True, bias=bool(config.extra.get("qkv_bias"))),
        Site("out", hidden, heads, residual=True),
        Site("gate", 2 * inner, hidden, norm=True, gate=True),
        Site("down", hidden, inner, residual=True),
    ]


def candidates(site: Site, block_m: int, most: int) -> list[Tile]:
    """Tiles that fit, with enough programs; a fixed random choice of them."""
    found = []
    n = site.n // 2 if site.gate else site.n
    splits = (1,) if site.norm or site.gate else (1, 2, 4, 8)
    for tile in itertools.product((16, 32, 64, 128), (64, 128, 256, 512, 1024), (2, 4, 8), (2, 3, 4), splits):
        block_n, block_k, warps, stages, parts = tile
        rounds = -(-site.k // block_k // parts)
        bytes_ = (block_n * (1 + site.gate) + block_m) * block_k * 2 * (stages if rounds > 1 else 1)
        programs, size = -(-n // block_n) * parts, block_n * block_k
        if bytes_ > SHARED or not MIN_PROGRAMS <= programs <= MAX_PROGRAMS or not 4096 <= size <= 16384 * warps:
            continue
        if block_n * block_m * (1 + site.gate) > 4096 * warps or (warps == 2) != (block_n < 64 and size <= 8192):
            continue
        if block_n == 64 and warps == 8:
            continue  # with 4 stages Triton 3.6 compiles a race, which a single check does not always show
        if stages == (2 if rounds > 2 else 3) or stages > max(2, rounds):
            continue
        found.append(tile)
    random.Random(f"{site}/{block_m}").shuffle(found)
    return found[:most]


def works(site: Site, rows: int, tile: Tile) -> bool:
    """Compile a tile and compare it with the reference; False if it does not fit or is compiled wrong."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)

    x, weight = draw(rows, site.k), draw(site.n, site.k) * 0.02
    norm = draw(site.k) if site.norm else None
    bias = draw(site.n) if site.bias else None
    residual = draw(rows, site.n) if site.residual else None
    torch.cuda.synchronize()  # the kernel takes weights for granted that stand there since long
    around = {"norm": norm, "eps": 1e-6, "gate": site.gate, "residual": residual}
    try:
        found = skinny.skinny(x, weight, bias, (rows, tile), **around).float()  # type: ignore[arg-type]
    except OutOfResources:
        return False
    if site.gate and norm is not None:
        want = reference.norm_gate(x, norm, 1e-6, weight, bias).float()
    elif norm is not None:
        want = reference.norm_linear(x, norm, 1e-6, weight, bias).float()
    elif residual is not None:
        want = reference.linear_add(x, weight, bias, residual).float()
    else:
        want = reference.linear(x, weight, bias).float()
    error = (found - want).norm() / want.norm()
    if not error < 2e-2:
        print(f"{site} {tile} at {rows} rows: relative error {error:.1e}", flush=True)
    return bool(error < 2e-2)


def step_us(core: EngineCore, rows: int) -> float:
    """Median of a captured decode step of so many rows that have no tokens yet."""
    graphs = core.executor.stepper._graphs
    if graphs is None:
        raise RuntimeError("no graphs")
    with torch.inference_mode():
        graph = graphs.decode._capture(DecodeGraph(rows)).step
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for _ in range(8):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / 8)
    return statistics.median(times[1:])


def tune(core: EngineCore, site: Site, rows: int, most: int) -> str:
    """Choose a site's tile; one line."""
    entries = site.table.setdefault((site.n, site.k), {})
    now = entries.pop(rows, None)
    cublas = best_us = step_us(core, rows)
    best: Tile | None = None
    tried = dict.fromkeys([*([] if now is None else [now]), *candidates(site, rows, most)])
    timed = []
    for tile in [tile for tile in tried if works(site, rows, tile)]:
        entries[rows] = tile
        timed.append((step_us(core, rows), tile))
    for _, tile in sorted(timed)[:3]:  # again, as one reading may be lucky
        entries[rows] = tile
        took = statistics.median(step_us(core, rows) for _ in range(3))
        if took < 0.998 * best_us:
            best_us, best = took, tile
    entries.pop(rows, None)
    if best is not None:
        entries[rows] = best
    return f"{site.name} ({site.n}, {site.k}): {{{rows}: {best}}}  step {best_us:.1f} us, cuBLAS here {cublas:.1f}"


def main() -> int:
    """Tune a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", nargs="+", type=int, default=list(skinny.ROWS), choices=skinny.ROWS)
    parser.add_argument("--most", type=int, default=70, help="tiles tried for each product")
    parser.add_argument("--compile", nargs=2, type=int, metavar=("I", "OF"), help="compile a share of the tiles")
    args = parser.parse_args()
    if args.compile is not None:
        hf = read_config(args.folder)
        plugin = {"Qwen2ForCausalLM": Qwen2, "Qwen3ForCausalLM": Qwen3}.get(hf["architectures"][0], Llama)
        found = sites(plugin.config_from_hf(hf))
        jobs = [(s, rows, t) for rows in args.rows for s in found for t in candidates(s, rows, args.most)]
        for site, rows, tile in jobs[args.compile[0] :: args.compile[1]]:
            works(site, rows, tile)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((args.folder / "config.json").read_text())
        config = {name: value for name, value in config.items() if name not in ("layer_types", "max_window_layers")}
        (Path(folder) / "config.json").write_text(json.dumps({**config, "num_hidden_layers": NUM_LAYERS}))
        settings = {"device": "cuda", "dtype": "auto", "load_format": "dummy", "max_total_tokens": 20_000}
        core = make_core(Path(folder), **settings)
    print(f"{args.folder.name}, {NUM_LAYERS} layers")
    for rows in args.rows:
        for site in sites(core.executor.runner.config):
            print(rows, tune(core, site, rows, args.most), flush=True)
    core.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
