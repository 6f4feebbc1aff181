"""Attention backends side by side: `python tests/benchmarks/attention_backends.py --backends triton fa3` (needs a GPU).

Printed as a table, for the heads of the models of `docs/benchmarks-gpu.md`: prompts of one request, and decode
rows over a context of one length. A backend is named as the registry has it, or as `module:Class`; the first is what
the others are compared with, in time and in result. `--loads` has loads of one's own: requests, cached tokens of each,
new tokens of each, KV heads, query heads of each KV head, head dim.

A step has layers with caches of their own, so many that decode rows do not find them in the L2 cache, and is recorded
in one graph with what a backend works out once a step; the time is a layer's. New keys and values are not written: all
backends do that with one kernel. A prompt's figure is of the causal half, a decode row's of its keys and values.
Triton's kernels are compiled first, in processes of their own. What is not measured within `--limit-s` is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pkgutil
import time
from collections.abc import Callable, Iterator

import torch
from expert_tiles import graph_us

from dovetail.cache.pool import PagedKVPool
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, ForwardBatch, Phase
from dovetail.contracts.config import ModelConfig
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime.attention.grouped import attended_groups, of_group
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.kernels.ahead import CompiledAhead
from dovetail_testing.conformance.attention_world import Case

PAGE = 16
HEADS = {"0.5B": (2, 7, 64), "0.6B": (8, 2, 128), "8B": (8, 4, 128)}
"""KV heads, query heads of each, and head dim of Qwen2.5-0.5B, Qwen3-0.6B, and Llama-3.1-8B or Qwen3-8B."""
PROMPTS = (512, 2048, 16384)
ROWS = (1, 16, 64, 256)
CONTEXTS = (1024, 8192)
PAST_L2 = 128 << 20
MIN_LAYERS, MAX_LAYERS = 3, 256
ALIKE = 2e-2
"""Most that a result may differ from the first backend's: the norm of the difference, as a part of the result's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """`num` requests with `cached` tokens each that bring `new` ones each, and the heads that attend."""

    name: str
    num: int
    cached: int
    new: int
    kv_heads: int
    group: int
    dim: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """Read one of `--loads`."""
        return cls(text, *(int(part) for part in text.split("x")))

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all requests, of one layer."""
        return self.num * (self.cached + self.new) * self.kv_heads * self.dim * 4

    @property
    def num_layers(self) -> int:
        """Layers of the step."""
        if self.new > 1:
            return MIN_LAYERS
        return min(MAX_LAYERS, max(MIN_LAYERS, math.ceil(PAST_L2 / self.cache_bytes)))

    def config(self) -> ModelConfig:
        """Return the facts of a model with such layers."""
        case = Case(
            lengths=[(self.cached, self.new)], page_size=PAGE, dtype=torch.bfloat16, head_dim=self.dim,
            num_qo_heads=self.kv_heads * self.group, num_kv_heads=self.kv_heads,
        )  # fmt: skip
        layers = tuple(case.spec(index) for index in range(self.num_layers))
        return dataclasses.replace(case.config(), num_layers=len(layers), layers=layers)

    def figure(self, us: float) -> str:
        """What so many microseconds a layer come to."""
        if self.new == 1:
            return f"{self.cache_bytes / us / 1e3:.0f} GB/s"
        pairs = self.cached * self.new + self.new * self.new / 2
        return f"{4 * self.num * self.kv_heads * self.group * self.dim * pairs / us / 1e6:.0f} TFLOP/s"


def usual_loads() -> Iterator[Load]:
    """Those of all models."""
    for model, heads in HEADS.items():
        for tokens in PROMPTS:
            yield Load(f"{model} prompt {tokens}", 1, 0, tokens, *heads)
        for context in CONTEXTS:
            for rows in ROWS:
                yield Load(f"{model} {rows} rows at {context}", rows, context - 1, 1, *heads)


class Step:
    """Layers of a load over a filled pool, to be run again and again.

    The host knows lengths of prompts, as it does of long ones, which engines do not capture into graphs.
    """

    def __init__(self, load: Load, backend_class: type[AttentionBackend]) -> None:
        torch.manual_seed(0)
        num, new, device, length = load.num, load.new, torch.device("cuda"), load.cached + load.new
        config = load.config()
        [group] = attended_groups(config)
        pages = -(-length // PAGE)
        pool = PagedKVPool(group, num * pages + 1, PAGE, torch.bfloat16, device)
        for spec in config.layers:
            pool.layer(spec.index).normal_()
        self.backend = backend_class(of_group(config, group), pool, device)
        self.layers = [AttentionLayer.of(spec) for spec in config.layers]
        starts = torch.arange(num + 1, dtype=torch.int32, device=device) * new
        places = (load.cached + torch.arange(new, device=device)).repeat(num)
        self.batch = ForwardBatch(
            num_decode=num if new == 1 else 0, positions=places, kv_slots=places, rows=torch.arange(num, device=device),
            page_table=1 + torch.randperm(num * pages, device="cuda").view(num, pages).to(torch.int32),
            seq_lens=torch.full((num,), length, device=device), q_starts=starts,
            seq_lens_cpu=[] if new == 1 else [length] * num, q_lens_cpu=[] if new == 1 else [new] * num,
            attention=self.backend, last_tokens=starts[1:].long() - 1,
        )  # fmt: skip
        self.q = torch.randn(num * new, load.kv_heads * load.group, load.dim, device=device, dtype=torch.bfloat16)
        self.k = torch.randn(num * new, load.kv_heads, load.dim, device=device, dtype=torch.bfloat16)
        self.out = torch.full_like(self.q, float("nan"))
        self.backend.init_graph_state(num, num * new)
        self.backend.plan(self.batch, Phase.CAPTURE)

    def run(self) -> None:
        """One step."""
        self.backend.plan_in_graph(self.batch)
        forward = self.backend.forward_decode if self.batch.num_decode else self.backend.forward_extend
        for layer in self.layers:
            forward(self.q, self.k, self.k, layer, self.batch, self.out)


def rehearsal(load: Load, backend_class: type[AttentionBackend]) -> Callable[[], None]:
    """Return what launches all kernels of a load; the step is as long as it is there, and no longer."""
    return lambda: Step(load, backend_class).run()


def took(load: Load, backend_class: type[AttentionBackend]) -> tuple[float, torch.Tensor]:
    """Microseconds of a layer, and what the last one gave."""
    step = Step(load, backend_class)
    with torch.inference_mode():
        return graph_us(step.run) / len(step.layers), step.out


def find(name: str) -> type[AttentionBackend]:
    """Return a backend's class."""
    found = pkgutil.resolve_name(name) if ":" in name else None
    if found is None:
        plan = make_plan(Registry.scan(), attention_backend=name, device="cuda")
        [(_, found)] = load(plan, "engine").candidates("attention_backend")
    backend: type[AttentionBackend] = found
    config = Load("", 1, 15, 1, 2, 2, 64).config()
    if (why := backend.why_not(config, torch.device("cuda"), torch.bfloat16, PAGE)) is not None:
        raise SystemExit(f"{name}: {why}")
    return backend


class Table:
    """Prints a line for each load as soon as it is measured, and counts what is wrong."""

    def __init__(self, names: list[str]) -> None:
        self.num_wrong = 0
        self._names = [name.rpartition(":")[2] for name in names]
        print(f"{'':24}" + "".join(f"{name:>28}" for name in self._names) + "  time of the first / others'", flush=True)

    def line(self, load: Load, classes: list[type[AttentionBackend]]) -> None:
        """Measure a load with each backend."""
        cells, ratios, first = [], [], None
        for backend in classes:
            try:
                us, out = took(load, backend)
            except Exception as error:  # the others' figures are wanted all the same
                self.num_wrong += 1
                cells.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
                continue
            cell = f"{us:.1f} us {load.figure(us):>12}"
            if first is None:
                first = us, out.float()
            else:
                apart = float((out.float() - first[1]).norm() / first[1].norm())
                ratios.append(f"{first[0] / us:.2f}")
                if not apart < ALIKE:  # NaN, too
                    self.num_wrong += 1
                    cell += f" WRONG by {apart:.2g}"
            cells.append(cell)
        print(f"{load.name:24}" + "".join(f"{cell:>28}" for cell in cells) + "  " + " ".join(ratios), flush=True)


def main() -> int:
    """Compile, then measure; results that differ and backends that raise make the exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", type=Load.parse, default=list(usual_loads()))
    parser.add_argument("--backends", nargs="+", default=["triton", "fa3"])
    parser.add_argument("--limit-s", type=float, default=90.0)
    args = parser.parse_args()
    began = time.perf_counter()
    classes = [find(name) for name in args.backends]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    rehearsals = [rehearsal(load, backend) for backend in classes for load in args.loads]
    CompiledAhead(device_of(torch.device("cuda")), [__file__, args.backends, args.loads]).compile(rehearsals)
    print(f"compiled in {time.perf_counter() - began:.1f} s", flush=True)
    table, left_out = Table(args.backends), []
    for each in args.loads:
        if time.perf_counter() - began > args.limit_s:
            left_out.append(each.name)
        else:
            table.line(each, classes)
    print(f"{time.perf_counter() - began:.1f} s; left out: {', '.join(left_out) or 'nothing'}", flush=True)
    return int(table.num_wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
