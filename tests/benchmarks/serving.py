"""What HTTP costs: server processor time per streamed token, tokens per second, and whether anything is lost.

    python tests/benchmarks/serving.py                                   # paced and unpaced, 1, 16, 64 and 256 streams
    python tests/benchmarks/serving.py --streams 1000 --tokens 200
    python tests/benchmarks/serving.py --streams 64 --profile out.prof   # cProfile of the server
    python tests/benchmarks/serving.py --against ../older                # another checkout, taking turns
    python tests/benchmarks/serving.py --kind logprobs schema tools      # other requests than plain chats

The engine is a script in a process of its own behind the real transport (`serving_engine.py`), the reader is this one.
Paced, the engine makes a token every `--us` microseconds: hardly two wait for one another, so each is an event.
Unpaced, it sends as fast as the server takes them. Every stream is read to its end and compared with what the engine
sent. The time is that of the server's process from the moment that every stream has begun until the first ends; `whole`
is from the first connection to the last end, with the cost of taking the requests. `delay` is from the engine's step to
the reader, at one stream.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.table import Table
from serving_client import Stream, cpu_s, read_all, rss_mib
from serving_engine import script

from dovetail.demo import MODEL_DIR
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.bench.workloads import EXTRAS

PATH = "/v1/chat/completions"
READY_S = 120
PARTS = ("framework", "server", "plugins/models", "plugins/parsers", "plugins/backends", "plugins/grammar")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    us_token: float
    whole_us_token: float
    tok_s: float
    tokens_event: float
    delay_ms: float
    rss_mib: float


def packages_of(tree: Path) -> list[Path]:
    """Return the folders of a checkout that hold its packages."""
    return [tree.resolve() / part for part in PARTS]


def search_path(*first: Path) -> str:
    """Return a `PYTHONPATH` with these folders before what stands there now: packages may be installed by it alone."""
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextlib.contextmanager
def server(
    tick_s: float, tree: Path | None = None, profile: str = "", kind: str = "plain"
) -> Iterator[tuple[int, int]]:
    """Run `dovetail serve` over the scripted engine; yield its port and process id.

    Another `tree` runs its own copy of this file, in its own environment if it has one (`.venv`).
    """
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port"
        environment, python, program = dict(os.environ), Path(sys.executable), Path(__file__)
        if tree is not None:
            program = tree.resolve() / "tests/benchmarks/serving.py"
            if (own := tree.resolve() / ".venv/bin/python").exists():
                python = own
            else:
                environment["PYTHONPATH"] = search_path(*packages_of(tree))
        command = [
            str(python),
            str(program),
            "--serve",
            str(tick_s),
            str(port_file),
            "--profile",
            profile,
            "--kind",
            kind,
        ]
        process = subprocess.Popen(command, env=environment, cwd=scratch)
        try:
            yield wait_ready(process, port_file), process.pid
        finally:
            process.terminate()
            process.wait(60)


def wait_ready(process: subprocess.Popen[bytes], port_file: Path) -> int:
    """Return the port once requests are served."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, ValueError, requests.RequestException):
            port = int(port_file.read_text())
            if requests.get(f"http://127.0.0.1:{port}/readyz", timeout=2).status_code == 200:
                return port
        time.sleep(0.05)
    raise RuntimeError("the server did not become ready")


def serve(tick_s: float, port_file: Path, profile: str, kind: str) -> int:
    """Be the server: everything as `dovetail serve` has it, but for the engine's process."""
    from serving_engine import ScriptedProcess

    from dovetail_server.cli import serve as cli
    from dovetail_server.start import preflight, run

    listener = preflight.bind("127.0.0.1", 0)
    port_file.write_text(str(listener.getsockname()[1]))
    preflight.bind = lambda host, port: listener
    run.make_engine = lambda settings, plan: ScriptedProcess(run.engine_settings(settings), plan, tick_s, kind=kind)
    flags = ["--disable-access-log", "--log-level", "warning", "--max-running-requests", "4096"]
    flags += ["--file-storage-path", str(port_file.parent / "files"), "--min-free-disk-bytes", "0"]
    if not profile:
        return cli.main(flags)
    import cProfile

    profiler = cProfile.Profile()
    try:
        return profiler.runcall(cli.main, flags)
    finally:
        profiler.dump_stats(profile)


def body_of(kind: str, num_tokens: int) -> dict[str, Any]:
    """Return the body of a request; what it has beside a plain one is as in `dovetail bench serve --suite user`."""
    body: dict[str, Any] = {"model": "dovetail-demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    return body | {"max_tokens": num_tokens, "ignore_eos": True} | EXTRAS.get(kind, {})


def measure(port: int, pid: int, num_streams: int, num_tokens: int, kind: str = "plain") -> Row:
    """Run the streams once, check every one, and say what they cost."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = body_of(kind, num_tokens)
    if num_streams == 1:
        body["stream_options"] = usage  # carries the engine's clock
    samples: list[tuple[float, float]] = []
    cpu, began = cpu_s(pid), time.monotonic()
    streams = [Stream(port, PATH, body) for _ in range(num_streams)]
    read_all(streams, 600, lambda: samples.append((time.monotonic(), cpu_s(pid))))
    whole, seconds = cpu_s(pid) - cpu, time.monotonic() - began
    check(streams, num_tokens, kind)
    begin = max(stream.received[0][0] for stream in streams)
    end = min(stream.received[-1][0] for stream in streams)
    total_bytes = sum(len(data) for stream in streams for _, data in stream.received)
    window = [(at, used) for at, used in samples if begin <= at <= end]
    if len(window) < 2:
        window = [samples[0], samples[-1]]
    (t0, c0), (t1, c1) = window[0], window[-1]
    inside = sum(len(data) for stream in streams for at, data in stream.received if t0 < at <= t1)
    tokens = num_streams * num_tokens * inside / total_bytes
    events = sum(len(stream.events()) - 2 for stream in streams)
    return Row(
        us_token=1e6 * (c1 - c0) / tokens,
        whole_us_token=1e6 * whole / (num_streams * num_tokens),
        tok_s=num_streams * num_tokens / seconds,
        tokens_event=num_streams * num_tokens / events,
        delay_ms=delay_ms(streams[0]) if num_streams == 1 else float("nan"),
        rss_mib=rss_mib(pid),
    )


def check(streams: list[Stream], num_tokens: int, kind: str) -> None:
    """Compare every stream with what the engine sent."""
    first, ids = script(kind)
    whole = (first + ids * (num_tokens // len(ids) + 1))[:num_tokens]
    expected = Tokenizer.load(MODEL_DIR).decode(whole, skip_special_tokens=True)
    if kind == "tools":
        expected = expected.partition('"arguments": ')[2]
    for stream in streams:
        choices = [event["choices"][0] for event in stream.events() if event["choices"]]
        text = "".join(text_of(choice["delta"]) for choice in choices)
        if text.strip() != expected.strip():
            raise RuntimeError(f"a stream differs: {text[:200]!r}")
        rows = [row for choice in choices if choice.get("logprobs") for row in choice["logprobs"]["content"]]
        if kind == "logprobs" and (len(rows) != num_tokens or {len(row["top_logprobs"]) for row in rows} != {5}):
            raise RuntimeError(f"a stream has log probabilities of {len(rows)} tokens, not of {num_tokens}")


def text_of(delta: dict[str, Any]) -> str:
    """Return what a chunk adds to the reply, or to the arguments of its call."""
    calls = [call["function"].get("arguments", "") for call in delta.get("tool_calls", ())]
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "") + "".join(calls)


def delay_ms(stream: Stream) -> float:
    """Return the median time from the engine's step to the reader, over events that came alone."""
    found = []
    for at, data in stream.received:
        if data.count(b'"cached_tokens":') == 1 and data.count(b"data: ") == 1:
            clock = data.partition(b'"cached_tokens":')[2]
            found.append(at * 1e3 - int(clock[: clock.index(b"}")].split(b",")[0]) / 1e3)
    return statistics.median(found) if found else float("nan")


def main() -> int:
    """Parse flags, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--us", type=float, default=150.0, help="paced: microseconds between tokens, all streams")
    parser.add_argument("--pace", choices=["paced", "unpaced", "both"], default="both")
    parser.add_argument("--against", type=Path, help="another checkout to take turns with")
    parser.add_argument("--profile", default="", help="write the server's cProfile here")
    parser.add_argument("--kind", choices=["plain", "logprobs", "schema", "tools"], nargs="+", default=["plain"])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(float(arguments.serve[0]), Path(arguments.serve[1]), arguments.profile, arguments.kind[0])
    table = Table(title="HTTP server, processor time per streamed token")
    for name in (
        "tree",
        "streams",
        "kind",
        "pace",
        "µs/token",
        "whole µs/token",
        "tok/s",
        "tokens/event",
        "delay ms",
        "RSS MiB",
    ):
        table.add_column(name, justify="right")
    trees = [None] if arguments.against is None else [arguments.against, None]
    for pace in ("paced", "unpaced") if arguments.pace == "both" else (arguments.pace,):
        for count in arguments.streams:
            for kind in arguments.kind:
                compare(table, trees, count, pace, kind, arguments)
    Console(width=120).print(table)
    return 0


def compare(
    table: Table, trees: list[Path | None], count: int, pace: str, kind: str, arguments: argparse.Namespace
) -> None:
    """Measure every checkout in turn, several rounds, and add a row of medians for each."""
    tick_s = max(arguments.us * 1e-6 * count, 0.002) if pace == "paced" else 0.0
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server(tick_s, tree, arguments.profile, kind)) for tree in trees]
        rows: list[list[Row]] = [[] for _ in trees]
        for round_ in range(arguments.rounds + 1):
            for i, (port, pid) in enumerate(servers):
                row = measure(port, pid, count, arguments.tokens, kind)
                if round_:
                    rows[i].append(row)
    for tree, found in zip(trees, rows, strict=True):
        cells = [
            f"{statistics.median(getattr(row, name) for row in found):.{digits}f}"
            for name, digits in zip(Row.__dataclass_fields__, (1, 1, 0, 1, 2, 0), strict=True)
        ]
        table.add_row("this" if tree is None else tree.name, str(count), kind, pace, *cells)


if __name__ == "__main__":
    sys.exit(main())
