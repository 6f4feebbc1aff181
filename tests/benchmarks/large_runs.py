"""Large shapes on several GPUs of one host, step by step: `python tests/benchmarks/large_runs.py STEP… --out FOLDER`.

A step is one of these; SHAPE is a name of `large_shapes.py`, and `:whole` behind it gives ranks whole experts:

- `sums`: what the sums of a decode step take, and whether their bits are those of shares added in rank order;
- `serve:SHAPE`: an engine with random weights: its start, one stream and 64, the kernels of a step, and with `:lose` at
  last a rank that is killed under 16 streams;
- `http:SHAPE`: the same loads by `dovetail bench serve`, from the start of a server on, with `--tokenizer`;
- `same:SHAPE`: two layers of the real widths, packed as published, with 16 experts: whether ranks say what one says.

Each step runs in processes of its own, for a limited time (`STEP=SECONDS`), and writes what it has as it goes: FOLDER
has `results.json`, `log.txt`, and `part.json` of a step under way. `--seconds` bounds all steps. The floor is counted
as `large_steps.py` does it, at the copy bandwidth that is measured first; `--tiny` tries everything on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from large_shapes import SHAPES, write_checkpoint, write_shape
from large_steps import is_divided, measured_parts, step
from rich.console import Console
from rich.table import Table

LIMITS = {"copy": 60, "sums": 120, "serve": 170, "http": 120, "same": 150}
"""Seconds of a step."""
LEAST_S = 20.0
"""With less time left, no step is begun."""
LOADS = {1: (36, 512), 64: (512, 256)}
"""Tokens in and out by streams, as `single` and `c64` of the standard suite have them."""
PROFILED, PROFILE_NEW = 20, 128
LOST = (16, 128, 256)
"""Streams that lose a rank, and their tokens in and out."""
PROMPTS = [[(7 * i + j * j) % 190 for j in range(5 + 23 * i)] for i in range(6)]
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
TINY = LAYERS | {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512,
    "moe_intermediate_size": 512, "vocab_size": 512,
}  # fmt: skip
TRUNCATED = LAYERS | {"vocab_size": 512}
NUM_EXPERTS = 16
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
TOLD = ("output_tok_s", "ttft_ms", "tpot_ms", "itl_ms")
Note = Callable[..., None]


def shape(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes that a shape has keys for; with all of them it has few experts, too."""
    few = dict.fromkeys(EXPERTS, NUM_EXPERTS) if changes else {}
    return {key: value for key, value in (changes | few).items() if key in SHAPES[name]}


def serve(name: str, ways: list[str], wish: argparse.Namespace, note: Note) -> None:
    """Measure an engine with random weights."""
    asyncio.run(_serve(name, ways, wish, note))


async def _serve(name: str, ways: list[str], wish: argparse.Namespace, note: Note) -> None:
    from ranked_engine import RankedEngine, kernels_of

    loads = {1: (12, 16), 4: (20, 16)} if wish.tiny else LOADS
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(Path(folder) / name, name, **shape(name, TINY if wish.tiny else {}))
        engine = RankedEngine(
            model, wish.ranks, max_restarts=1, device=wish.device, max_running_requests=max(loads),
            expert_parallel="whole" in ways, **wish.settings,
        )  # fmt: skip
        ready, answered = await engine.start()
        try:
            info = engine.info
            note(ready_s=ready, first_answer_s=answered, weights_gib=info.weight_bytes / 2**30)
            note(cache_tokens=info.max_total_tokens, attention=info.attention_backend)
            for num, load in loads.items():
                note(**{f"tok_s_{num}": await engine.rate(num, *load)})
            for num, (num_prompt, num_new) in loads.items():
                steps = 4 if wish.tiny else PROFILED
                trace = await engine.profile(num, num_prompt, min(num_new, PROFILE_NEW), steps, Path(folder))
                note(**{f"kernels_{num}": kernels_of(trace, steps)})
            if "lose" in ways:
                note(lost=await engine.lose_rank(*((4, 20, 200) if wish.tiny else LOST)))
        finally:
            await engine.close()


def http(name: str, ways: list[str], wish: argparse.Namespace, note: Note) -> None:
    """Measure a server from its start on."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(Path(folder) / name, name, **shape(name, TINY if wish.tiny else {}))
        out = wish.out / "http.json"  # which has the first loads if the step is cut
        load = ["--num-prompts", "4", "--input-len", "20", "--output-len", "8"]
        load = load if wish.tiny else ["--suite", "standard", "--only", ",".join(("single", "c64"))]
        command = [sys.executable, "-m", "dovetail_server", "bench", "serve", "--model-path", str(model), *load]
        command += ["--prompts", "ids", "--json", str(out), "--", "--load-format", "dummy", "--tp", str(wish.ranks)]
        command += ["--context-length", "2048", "--device", wish.device, *wish.flags]
        subprocess.run([*command, *(["--expert-parallel"] if "whole" in ways else [])], check=True)
        found = json.loads(out.read_text())
        note(**found["start"])
        for one in found["workloads"]:
            note(**{one["workload"]["name"]: {key: one[key] for key in TOLD}})


def same(name: str, ways: list[str], wish: argparse.Namespace, note: Note) -> None:
    """Compare ranks with one: in float32 they say the same, in bfloat16 they are about as near to that as one is."""
    import ranked_engine

    usual = {"device": wish.device, "max_total_tokens": 8192, "context_length": 512, **wish.settings}
    with tempfile.TemporaryDirectory(dir=wish.scratch) as folder:
        changes = shape(name, (TINY if wish.tiny else {}) | TRUNCATED)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # which leaves none of a GPU's memory taken
            model = pool.submit(write_checkpoint, Path(folder) / name, name, wish.device, **changes).result()

        def said(told: str, num: int, **more: Any) -> ranked_engine.Said | None:
            try:
                return ranked_engine.said(model, num, PROMPTS, **usual, **more)[0]
            except Exception as error:  # what one does not serve is no reason to leave out the others
                note(**{told: f"{type(error).__name__}: {error}"[:300]})
                return None

        def alone(dtype: str, at: int) -> ranked_engine.Said | None:
            return said(f"one_{dtype}", 1, dtype=dtype, **({} if wish.tiny else {"devices": (at,)}))

        with ThreadPoolExecutor(2) as pool:
            exact, rounded = pool.map(alone, ("float32", "bfloat16"), (0, min(1, wish.ranks - 1)))
        if (base := exact or rounded) is None:
            return
        note(tokens=sum(map(len, base)), **({} if rounded is None else {"one_bfloat16": off(rounded, base)}))
        for whole in (whole for whole in (False, True) if is_divided(SHAPES[name], wish.ranks, whole=whole)):
            for dtype in ("float32", "bfloat16") if exact else ("bfloat16",):
                told = f"{'whole' if whole else 'by_width'}_{dtype}"
                found = said(told, wish.ranks, dtype=dtype, expert_parallel=whole)
                note(**({} if found is None else {told: off(found, base)}))


def off(found: Any, exact: Any) -> dict[str, float]:
    """Say how many tokens agree before the first other one, and how far log probabilities are off there."""
    from ranked_engine import errors

    far = errors(found, exact)
    return {"tokens": len(far), "mean": statistics.fmean(far) if far else 0.0, "most": max(far, default=0.0)}


def sums(name: str, ways: list[str], wish: argparse.Namespace, note: Note) -> None:
    """Time sums; see `ranks.py`."""
    import ranks

    note(rows=ranks.sums(wish.ranks, check=wish.tiny))


def copy(name: str, ways: list[str], wish: argparse.Namespace, note: Note) -> None:
    """Measure the bandwidth of a device."""
    from dovetail_server.bench.bandwidth import copy_bandwidth

    rate, device = copy_bandwidth(wish.device)
    note(bytes_per_s=rate, device=device)


DO: dict[str, Callable[[str, list[str], argparse.Namespace, Note], None]] = {
    "copy": copy, "sums": sums, "serve": serve, "http": http, "same": same,
}  # fmt: skip


def table_of(found: dict[str, Any]) -> Table:
    """Lay what was measured beside the floor and the simulation."""
    times = measured_parts(found)
    table = Table(title=f"{found['copy'].get('device')} x {found['ranks']}, {times.bandwidth / 1e12:.2f} TB/s")
    for head in ("step", "ready s", "answer s", "streams", "tok/s", "floor", "of it", "guess", "of it", "sums: profile",
                 "sums: counted", "none runs", "else"):  # fmt: skip
        table.add_column(head)
    for at, one in found["steps"].items():
        kind, _, name = at.partition(":")
        name, *ways = name.split(":")
        start = [f"{one[key]:.1f}" if key in one else "" for key in ("ready_s", "first_answer_s")]
        rest = {key: value for key, value in one.items() if key in ("lost", "failed", "single", "c64")}
        if kind == "same":
            rest |= one
        for num in LOADS:
            if f"tok_s_{num}" not in one or kind != "serve":
                continue
            paper = step(SHAPES[name], found["ranks"], num, whole="whole" in ways, times=times)
            rate = one[f"tok_s_{num}"]
            kernels = {row["kernel"]: row["us"] for row in one.get(f"kernels_{num}", ())}
            whole_us = kernels.get("a step")
            shares = [f"{kernels[key] / whole_us:.2f}" if whole_us else "" for key in ("sums", "none runs")]
            cells = [f"{rate:,.1f}", f"{paper['floor_tok_s']:,.0f}", f"{rate / paper['floor_tok_s']:.2f}"]
            cells += [f"{paper['guess_tok_s']:,.0f}", f"{paper['guess']:.2f}", shares[0]]
            cells += [f"{paper['sums_us'] * rate / num / 1e6:.2f}", shares[1]]
            table.add_row(at, *start, str(num), *cells, "")
        if rest or "tok_s_1" not in one:
            table.add_row(at, *start, *[""] * 9, json.dumps(rest, default=str))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", metavar="STEP")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; it may have some already")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=570.0, help="for all steps together")
    parser.add_argument("--tiny", action="store_true", help="small widths on the CPU, to try the program")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer that servers are given, for http:SHAPE")
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints that are compared")
    parser.add_argument("--do", action="store_true", help=argparse.SUPPRESS)
    wish = parser.parse_args()
    for at in wish.steps:
        kind, _, name = at.partition("=")[0].partition(":")
        if kind not in DO or (kind not in ("copy", "sums") and name.split(":")[0] not in SHAPES):
            kinds = "sums, serve:SHAPE, http:SHAPE or same:SHAPE"
            parser.error(f"{at}: a step is {kinds}; a SHAPE is one of {', '.join(SHAPES)}")
    wish.device = "cpu" if wish.tiny else "cuda"
    wish.settings = {"num_threads": 1} if wish.tiny else {}
    wish.flags = ["--num-threads", "1"] if wish.tiny else []
    wish.flags += ["--tokenizer-path", str(wish.tokenizer.absolute())] if wish.tokenizer else []
    if wish.do:
        do(wish)
    else:
        run_all(wish)


def do(wish: argparse.Namespace) -> None:
    """Be the process of a step."""
    kind, _, name = wish.steps[0].partition(":")
    name, *ways = name.split(":")
    found: dict[str, Any] = {}

    def note(**more: Any) -> None:
        found.update(more)
        (wish.out / "part.json").write_text(json.dumps(found, default=str))

    DO[kind](name, ways, wish, note)


def run_all(wish: argparse.Namespace) -> None:
    """Run the steps one after the other, and print a table."""
    wish.out.mkdir(parents=True, exist_ok=True)
    kept, until = wish.out / "results.json", time.monotonic() + wish.seconds
    found: dict[str, Any] = {"steps": {}, "copy": {}} | (json.loads(kept.read_text()) if kept.exists() else {})
    before = found["copy"].get("device"), found.get("ranks", wish.ranks)
    found["ranks"] = wish.ranks
    for asked in ["copy", *wish.steps]:
        at, _, limit = asked.partition("=")
        left = until - time.monotonic()
        if left < LEAST_S:
            print(f"{at}: not begun, {left:.0f} s are left", flush=True)
            continue
        began = time.monotonic()
        one = run(at, min(left - 5, float(limit or LIMITS[at.partition(":")[0]])), wish)
        one["took_s"] = time.monotonic() - began
        if at in ("copy", "sums"):
            found[at] = one
            if at == "copy" and found["steps"] and before != (one.get("device"), wish.ranks):
                print(f"results of {before} are left out", flush=True)
                found = {"copy": one, "steps": {}, "ranks": wish.ranks}
        else:
            found["steps"][at] = one
        kept.write_text(json.dumps(found, indent=1))
        brief = {key: value for key, value in one.items() if not key.startswith("kernels")}
        print(f"{at}: {json.dumps(brief, default=str)}", flush=True)
        Console(width=200).print(table_of(found))


def run(at: str, limit_s: float, wish: argparse.Namespace) -> dict[str, Any]:
    """Run a step in a process of its own, which ends with all that it started; returns what it has found."""
    part = wish.out / "part.json"
    part.unlink(missing_ok=True)
    command = [sys.executable, __file__, at, "--do", "--out", str(wish.out), "--ranks", str(wish.ranks)]
    command += (["--tiny"] if wish.tiny else []) + (["--scratch", str(wish.scratch)] if wish.scratch else [])
    command += ["--tokenizer", str(wish.tokenizer)] if wish.tokenizer else []
    failed = ""
    with (wish.out / "log.txt").open("ab") as log:
        log.write(f"\n==== {at}\n".encode())
        log.flush()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            if code := process.wait(limit_s):
                said = (wish.out / "log.txt").read_text("utf-8", "replace").strip().splitlines()[-1]
                failed = f"ended with code {code}: {said[-300:]}"
        except subprocess.TimeoutExpired:
            failed = f"cut after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, Any] = json.loads(part.read_text()) if part.exists() else {}
    part.unlink(missing_ok=True)
    return found | ({"failed": failed} if failed else {})


if __name__ == "__main__":
    main()
