"""How long checkpoints take to load on CPU, and with how much memory.

    python tests/benchmarks/loading.py PATH … [--as METHOD …]

For each PATH (a folder, or a GGUF file) and method, in a process of its own with the engine's environment: the weights
as the engine reads them, repacking included, in seconds and as a multiple of reading the files. METHOD is `auto` (as
the checkpoint is stored, the default), `plain`, or a value of `--quantization`, which a plain checkpoint is quantised
to. The files are in the page cache; to read them is to copy their bytes once, into memory that is kept, as a model's
is. Reading and loading take turns, and seconds are the best of three, processor seconds beside them: on a machine with
other work these are what can be compared. Those in packing go into one operator of oneDNN's, which brings bfloat16
matrices into the layout of its product: no load of them can do without. The peak is anonymous memory beyond that of the
loaded model.

`loading_files.py` writes such checkpoints.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROUNDS = 3
CHUNK = 1 << 24
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""The engine's."""


class Loaded(NamedTuple):
    """Seconds, processor seconds, those that oneDNN packs for, bytes held in the end, and at the peak beyond that."""

    wall_s: float
    cpu_s: float
    packing_s: float
    held: int
    over: int


def cpu_s() -> float:
    """Return the processor seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def anonymous_bytes() -> int:
    """Return the memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10


def weight_files(path: Path) -> list[Path]:
    """Return the files that hold the weights."""
    return [path] if path.is_file() else sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))


def read(path: Path) -> Loaded:
    """Read the files' bytes into memory."""
    import torch

    size = sum(file.stat().st_size for file in weight_files(path))
    before, wall, cpu = anonymous_bytes(), time.perf_counter(), cpu_s()
    kept = torch.empty(size, dtype=torch.uint8)
    view, at = memoryview(kept.numpy()), 0
    for file in weight_files(path):
        with file.open("rb", buffering=0) as opened:
            while num := opened.readinto(view[at : at + CHUNK]):
                at += num
    return Loaded(time.perf_counter() - wall, cpu_s() - cpu, 0.0, anonymous_bytes() - before, 0)


def load(path: Path, method: str) -> Loaded:
    """Load the weights."""
    import torch

    from dovetail.contracts.layers import BuildContext
    from dovetail.plugins import Registry
    from dovetail.plugins.loader import import_planned
    from dovetail.plugins.plan import as_planned
    from dovetail.runtime.checkpoint.folder import ModelFolder
    from dovetail.runtime.checkpoint.quantization import converted, factory_of, widths_of
    from dovetail.runtime.checkpoint.weights import load_weights
    from dovetail.runtime.hf_config import CONFIG_KEYS, quantization_config
    from dovetail_backends.kernels.cpu_linear import Repacked
    from dovetail_testing.targets import kernels_for, target_for

    read, registry = ModelFolder(path), Registry.scan()
    hf = read.config
    plugin = import_planned(as_planned(registry.resolve("model", read.architecture)))
    name = str(quantization_config(hf).get("quant_method", "plain")) if method == "auto" else method
    chosen = None if name == "plain" else import_planned(as_planned(registry.resolve("quantization", name)))
    config = read.model_config(plugin.config_from_hf, served=CONFIG_KEYS)
    widths_of(plugin, config)  # imports what the model's layers need
    before, most, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], anonymous_bytes())

    packing, pack = [], Repacked.pack

    def timed(kernel: Repacked, tensors: Mapping[str, torch.Tensor], half: str = "") -> torch.Tensor:
        start = time.thread_time()
        packed = pack(kernel, tensors, half)
        packing.append(time.thread_time() - start)
        return packed

    Repacked.pack = timed  # type: ignore[method-assign]
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    wall, cpu = time.perf_counter(), cpu_s()
    checkpoint = converted(chosen, read, plugin, config, target_for("bfloat16"))
    rules = plugin.weight_map(config)
    factory = factory_of(chosen, hf, rules, checkpoint.headers)
    with torch.inference_mode():
        ctx = BuildContext(device=torch.device("cpu"), dtype=torch.bfloat16, factory=factory, kernels=kernels_for())
        model = plugin.build(config, ctx)
        load_weights(model, rules, checkpoint)
    times = time.perf_counter() - wall, cpu_s() - cpu
    done.set()
    watching.join()
    held = anonymous_bytes()
    return Loaded(*times, sum(packing), held - before, max(0, most[0] - held))


def child(path: Path, method: str) -> Loaded:
    """Return what a fresh process finds."""
    command = [sys.executable, __file__, str(path), "--one", "--as", method]
    told = subprocess.run(command, capture_output=True, text=True, env={**ENVIRONMENT, **os.environ}, check=False)
    if told.returncode:
        raise SystemExit(told.stderr)
    wall, cpu, packing, held, over = told.stdout.splitlines()[-1].split()
    return Loaded(float(wall), float(cpu), float(packing), int(held), int(over))


def best(path: Path, methods: Sequence[str]) -> list[Loaded]:
    """Return the fastest of some runs of each method, which take turns."""
    found = [[child(path, method) for method in methods] for _ in range(ROUNDS)]
    return [
        Loaded(
            min(one.wall_s for one in runs),
            min(one.cpu_s for one in runs),
            min(one.packing_s for one in runs),
            runs[0].held,
            max(one.over for one in runs),
        )
        for runs in zip(*found, strict=True)
    ]


def main() -> None:
    """Print a row for each checkpoint and method."""
    parser = argparse.ArgumentParser(description="Loading of checkpoints on CPU.")
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--as", dest="methods", nargs="+", default=["auto"])
    parser.add_argument("--one", action="store_true", help="measure here and now; `read` is a method, too")
    args = parser.parse_args()
    if args.one:
        path, method = args.paths[0], args.methods[0]
        print(*(read(path) if method == "read" else load(path, method)))
        return
    print("| | MiB | read, s | load, s | of reading | processor s | in packing | held, MiB | peak beyond that, MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for path in args.paths:
        base, *loads = best(path, ["read", *args.methods])
        for method, one in zip(args.methods, loads, strict=True):
            name = path.name if method == "auto" else f"{path.name}, {method}"
            memory = f"{one.held / 2**20:,.0f} | {one.over / 2**20:,.0f}"
            print(
                f"| {name} | {base.held / 2**20:,.0f} | {base.wall_s:.2f} | {one.wall_s:.2f} "
                f"| {one.wall_s / base.wall_s:.1f} | {one.cpu_s:.2f} | {one.packing_s:.2f} | {memory} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
