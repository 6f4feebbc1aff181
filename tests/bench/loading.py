"""How long a checkpoint takes to load on CPU, and with how much memory: `python tests/bench/loading.py DIR [METHOD …]`.

For each method, in a process of its own with the engine's environment: the weights as the engine reads them, repacking
included, in seconds and as a multiple of reading the files. METHOD is `auto` (as the checkpoint is stored), `plain`, or
a value of `--quantization`, which a plain checkpoint is quantised to. The files are in the page cache; to read them is
to copy their bytes once, into memory that is kept, as a model's is. Seconds are the best of three,
processor seconds beside them: on a machine with other work these are what can be compared. The peak is anonymous memory
beyond that of the loaded model.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROUNDS = 3
CHUNK = 1 << 24
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""The engine's."""


class Loaded(NamedTuple):
    """Seconds, processor seconds, bytes held in the end, and at the peak beyond that."""

    wall_s: float
    cpu_s: float
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
    return Loaded(time.perf_counter() - wall, cpu_s() - cpu, anonymous_bytes() - before, 0)


def load(path: Path, method: str) -> Loaded:
    """Load the weights."""
    import torch

    from dovetail.contracts.layers import BuildContext
    from dovetail.contracts.quantization import Target
    from dovetail.plugins import Registry
    from dovetail.plugins.loader import import_planned
    from dovetail.plugins.plan import as_planned
    from dovetail.runtime.checkpoint.config_keys import translate
    from dovetail.runtime.checkpoint.quantization import Place, converted, factory_of, widths_of
    from dovetail.runtime.checkpoint.weights import load_weights
    from dovetail.runtime.hf_config import CONFIG_KEYS, architecture, quantization_config, read_config

    hf, registry = read_config(path), Registry.scan()
    plugin = import_planned(as_planned(registry.resolve("model", architecture(hf, path))))
    name = str(quantization_config(hf).get("quant_method", "plain")) if method == "auto" else method
    chosen = None if name == "plain" else import_planned(as_planned(registry.resolve("quantization", name)))
    config = translate(plugin.config_from_hf, hf, served=CONFIG_KEYS)
    widths_of(plugin, config)  # imports what the model's layers need
    before, most, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], anonymous_bytes())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    wall, cpu = time.perf_counter(), cpu_s()
    checkpoint = converted(chosen, hf, plugin, config, Place(path, Target("bfloat16", "cpu")))
    rules = plugin.weight_map(config)
    factory = factory_of(chosen, hf, rules, checkpoint.headers)
    with torch.inference_mode():
        ctx = BuildContext(device=torch.device("cpu"), dtype=torch.bfloat16, factory=factory)
        model = plugin.build(config, ctx)
        load_weights(model, rules, checkpoint)
    times = time.perf_counter() - wall, cpu_s() - cpu
    done.set()
    watching.join()
    held = anonymous_bytes()
    return Loaded(*times, held - before, max(0, most[0] - held))


def best(path: Path, method: str) -> Loaded:
    """Return the fastest of some runs in fresh processes."""
    command = [sys.executable, __file__, str(path), "--one", method]
    found = []
    for _ in range(ROUNDS):
        told = subprocess.run(command, capture_output=True, text=True, env={**ENVIRONMENT, **os.environ}, check=False)
        if told.returncode:
            raise SystemExit(told.stderr)
        wall, cpu, held, over = told.stdout.splitlines()[-1].split()
        found.append(Loaded(float(wall), float(cpu), int(held), int(over)))
    return Loaded(min(one.wall_s for one in found), min(one.cpu_s for one in found), *found[0][2:])


def main() -> None:
    """Print a row for each method."""
    path, methods = Path(sys.argv[1]), sys.argv[2:] or ["auto"]
    if methods[0] == "--one":
        print(*(read(path) if methods[1] == "read" else load(path, methods[1])))
        return
    base = best(path, "read")
    print(f"{path.name}: {base.held / 2**20:,.0f} MiB, read in {base.wall_s:.2f} s ({base.cpu_s:.2f} s of processor)\n")
    print("| | s | of reading | processor s | of reading | held, MiB | peak beyond that, MiB |")
    print("|---|---|---|---|---|---|---|")
    for method in methods:
        one = best(path, method)
        ratios = one.wall_s / base.wall_s, one.cpu_s / base.cpu_s
        print(
            f"| {method} | {one.wall_s:.2f} | {ratios[0]:.1f} | {one.cpu_s:.2f} | {ratios[1]:.1f} "
            f"| {one.held / 2**20:,.0f} | {one.over / 2**20:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
