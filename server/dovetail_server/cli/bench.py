"""`dovetail bench`: finds the benchmark and imports only that."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module

from dovetail_server.cli.exits import exit_code

BENCHMARKS = {
    "serve": (
        "dovetail_server.cli.bench_serve:main",
        "load on a server over HTTP: ours, or any that speaks OpenAI's API",
    ),
    "latency": ("dovetail_server.cli.bench_engine:latency", "the engine without HTTP, by batch size"),
    "grammar": ("dovetail_server.cli.bench_grammar:main", "structured outputs: schemas, masks, hostile grammars"),
    "throughput": ("dovetail_server.cli.bench_engine:throughput", "the offline LLM with many requests"),
}


def usage() -> str:
    """Return the text of `dovetail bench --help`."""
    lines = ["usage: dovetail bench BENCHMARK [options]", "", "Measure speed, beside the device's bandwidth floor.", ""]
    lines += ["benchmarks:", *(f"  {name:<12}{about}" for name, (_, about) in BENCHMARKS.items())]
    return "\n".join([*lines, "", "`dovetail bench BENCHMARK --help` shows its options."])


def main(argv: list[str]) -> int:
    """Run one benchmark. Exit code 2 for what the user can fix, 1 where requests or the server failed."""
    if not argv or argv[0] in {"-h", "--help", "help"}:
        print(usage())
        return 0 if argv else 2
    name = argv[0]
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"benchmarks: {', '.join(BENCHMARKS)}"
        print(f"dovetail bench: error: {name!r} is no benchmark; {hint}", file=sys.stderr)
        return 2
    module, _, function = BENCHMARKS[name][0].partition(":")
    return exit_code(f"bench {name}", lambda: int(getattr(import_module(module), function)(argv[1:])))
