"""What a prompt as text costs beside the same one as token ids, until the engine launches its first chunk.

    python tests/benchmarks/text_prompts.py parts DIR                       # where the time goes, in this process
    python tests/benchmarks/text_prompts.py served DIR                      # through HTTP, one prompt and bursts
    python tests/benchmarks/text_prompts.py served DIR --against ../older   # another checkout, taking turns
    python tests/benchmarks/text_prompts.py served DIR --prefill-ms 73      # 16,000 tokens of a prompt take so long
    python tests/benchmarks/text_prompts.py served DIR --prefill-ms 330+37  # and each step beside them, else 1 ms
    python tests/benchmarks/text_prompts.py streams DIR --loads 256x200     # beside streams of others

DIR is a model's folder: of it the tokenizer and `config.json` are read, no weights. Prompts are random tokens as text,
as `dovetail bench serve` sends them; no two are alike. `parts` does by hand what a request goes through, and ends where
the engine has planned the first chunk as it is launched. `served` asks a real HTTP server over a scripted engine in a
process of its own (`serving_engine.py`), which answers at once: `ms` is from sending to the first event of the last
prompt; `cpu ms` is what a prompt took of the HTTP server's process. Above 64 KiB another process reads the body, ids or
text alike. With `--prefill-ms` the engine is the real one over a device that only takes time (`paced_engine.py`), so
what is done while it computes costs nothing. On a loaded machine compare the least. `streams` keeps so many requests in
flight, each of which gets 64 tokens, one every 6 ms, and the next one follows on its connection: how long until the
first token of each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from serving import packages_of, search_path, wait_ready
from serving_client import cpu_s

from dovetail_server.bench.prompts import PromptVocabulary

CONTEXT_LEN = 1 << 15
PAGE_SIZE = 16
NUM_NEW, TICK_S = 64, 0.006
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
)


class Source:
    """Prompts of a tokenizer's folder, as text and as the ids that the text has."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer."""
        from dovetail.text.tokenizer.tokenizer import Tokenizer

        self.tokenizer = Tokenizer.load(folder)
        self._vocabulary = PromptVocabulary.of_folder(folder, readable=True)
        self._chance = random.Random(time.time_ns())

    def text(self, num_tokens: int) -> str:
        """Return a text of about so many tokens that nobody has seen."""
        found: str = self._vocabulary.tokenizer.decode(self._chance.choices(self._vocabulary.ids, k=num_tokens))
        return found

    def ids(self, num_tokens: int) -> list[int]:
        """Return the ids of such a text."""
        return self.tokenizer.encode(self.text(num_tokens), add_special_tokens=True)


class Prefix:
    """The prompts of a load, `PROMPTSxTOKENS` or `PROMPTSxCOMMON+TOKENS`."""

    def __init__(self, source: Source, load: str) -> None:
        """Make what they have in common."""
        count, lengths = load.split("x")
        *common, own = (int(part) for part in lengths.split("+"))
        self.num, self._own, self._source = int(count), own, source
        text = source.text(common[0]) if common else ""
        self._begin: dict[str, Any] = {
            "text": text, "ids": source.tokenizer.encode(text, add_special_tokens=True) if text else []
        }  # fmt: skip

    def prompts(self, kind: str) -> list[Any]:
        """Return prompts of a round, as text or as ids."""
        make = self._source.ids if kind == "ids" else self._source.text
        return [self._begin[kind] + make(self._own) for _ in range(self.num)]


def parts(folder: Path, num_tokens: int, rounds: int) -> None:
    """Print the time of each part of the way, least and median."""
    from dovetail.contracts.cache import FULL
    from dovetail.engine.device_rows import DeviceRows
    from dovetail.engine.kv_cache_manager import KVCacheManager
    from dovetail.engine.limits import StepLimits
    from dovetail.engine.request import EngineRequest
    from dovetail.engine.scheduler import Scheduler
    from dovetail.engine.step_builder import GraphChooser, StepBuilder
    from dovetail.messages import SamplerParams, Submit
    from dovetail.messages.step import ExecutorInfo, PrepareResult
    from dovetail.processing.sampling import check_token_ids
    from dovetail.text.tokenizer.cuts import pieces
    from dovetail.text.tokenizer.tokenizer import check_text
    from dovetail_server.apis.completions.schema import CompletionRequest
    from dovetail_server.reading.parse import decoded, validated
    from dovetail_server.supervision.wire import SubmitDecoder, SubmitEncoder
    from dovetail_testing.engine import make_policy

    source, took = Source(folder), {}
    tokenizer, vocab_size = source.tokenizer, source.tokenizer.vocab_size

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        took.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
        return result

    num_pages = 4 * num_tokens // PAGE_SIZE
    info = ExecutorInfo(
        architecture="", dtype="", device="cpu", vocab_size=vocab_size, hidden_size=1,
        context_len=CONTEXT_LEN, page_size=PAGE_SIZE, num_pages=(num_pages,), reaches=(FULL,), chunk_size=1,
        attention_backend="", prefix_group=0, weight_bytes=0, kv_bytes=0, load_s=0.0, graphs=(),
        prepared=PrepareResult(),
    )  # fmt: skip
    for _ in range(rounds):
        text = source.text(num_tokens)
        body = json.dumps({"model": "m", "prompt": text, "max_tokens": 1, "stream": True}).encode()
        data = timed("body: JSON", lambda: decoded(body))  # noqa: B023
        timed("body: model", lambda: validated(data, CompletionRequest))  # noqa: B023
        timed("text: checks", lambda: check_text(text))  # noqa: B023
        if tokenizer._cuts is not None:
            timed("text: cuts", lambda: list(pieces(text, tokenizer._cuts)))  # noqa: B023
        ids = timed("text: tokens", lambda: tokenizer.encode(text, add_special_tokens=True))  # noqa: B023
        as_ids = json.dumps({"model": "m", "prompt": ids, "max_tokens": 1, "stream": True}).encode()
        given = timed("ids: JSON", lambda: decoded(as_ids))  # noqa: B023
        timed("ids: model", lambda: validated(given, CompletionRequest))  # noqa: B023
        timed("ids: checks", lambda: check_token_ids(ids, vocab_size, "prompt"))  # noqa: B023
        submit = Submit(rid="", handle=1, prompt_ids=ids, params=SamplerParams(max_tokens=9))
        raw = timed("wire: encode", lambda: SubmitEncoder().encode(submit))  # noqa: B023
        got = timed("wire: decode", lambda: SubmitDecoder().decode(raw))  # noqa: B023
        rows = DeviceRows(8)
        pages = KVCacheManager(rows, page_size=PAGE_SIZE, num_pages=[num_pages])
        limits = StepLimits(max_running_requests=8, max_prefill_tokens=8192)
        scheduler = Scheduler(pages, make_policy(), limits)
        builder = StepBuilder(rows, GraphChooser(info, lambda key: None))
        request = timed("engine: admit", lambda: EngineRequest.from_submit(got, arrival=1, eos_ids=()))  # noqa: B023
        timed("engine: plan", lambda: plan_of(scheduler, builder, request))  # noqa: B023
    table = Table(title=f"A text of {num_tokens:,} tokens, {len(body):,} bytes; as ids {len(as_ids):,} bytes")
    for name in ("part", "least ms", "median ms"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for name, each in took.items():
        table.add_row(name, f"{min(each):.2f}", f"{statistics.median(each):.2f}")
    Console(width=120).print(table)


def plan_of(scheduler: Any, builder: Any, request: Any) -> Any:
    """Queue a request, and make the step with its first chunk as it is launched."""
    scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.launching(plan)
    step = builder.build(plan)
    scheduler.launched(plan)
    return step


@contextlib.contextmanager
def server(folder: Path, tree: Path | None, tick_s: float = 0.0, prefill_ms: str = "") -> Iterator[tuple[int, int]]:
    """Run `dovetail serve` over the scripted engine, or over the paced one; yield its port and process id."""
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port"
        environment = dict(os.environ)
        if tree is not None:
            environment["PYTHONPATH"] = search_path(*packages_of(tree))
        command = [sys.executable, __file__, "serve", str(folder.resolve())]
        command += ["--port-file", str(port_file), "--tick-s", str(tick_s), "--prefill-ms", prefill_ms]
        process = subprocess.Popen(command, env=environment, cwd=scratch)
        try:
            yield wait_ready(process, port_file), process.pid
        finally:
            process.terminate()
            process.wait(60)


def serve(folder: Path, port_file: Path, tick_s: float, prefill_ms: str) -> int:
    """Be the server: everything as `dovetail serve` has it, but for the engine's process."""
    import paced_engine
    from serving_engine import ScriptedProcess

    from dovetail_server.cli import serve as cli
    from dovetail_server.start import preflight, run

    listener = preflight.bind("127.0.0.1", 0)
    port_file.write_text(str(listener.getsockname()[1]))
    preflight.bind = lambda host, port: listener

    def make_engine(settings: Any, plan: Any) -> ScriptedProcess:
        made = ScriptedProcess(run.engine_settings(settings), plan, tick_s, folder)
        if prefill_ms:
            tokens_ms, _, step_ms = prefill_ms.partition("+")
            pace = float(step_ms or 1) / 1e3, float(tokens_ms) / 16e6
            made.command = (paced_engine.__file__, *map(str, pace), str(folder))
        return made

    run.make_engine = make_engine
    flags = ["--model-path", str(folder), "--served-model-name", "m", "--load-format", "dummy", "--device", "cpu"]
    flags += ["--disable-access-log", "--log-level", "warning", "--max-running-requests", "4096"]
    flags += ["--file-storage-path", str(port_file.parent / "files"), "--min-free-disk-bytes", "0"]
    return cli.main(flags)


def first_event_ms(port: int, prompts: list[Any]) -> float:
    """Send prompts at once, each over a connection that was there; return how long until all have begun."""
    bodies = [json.dumps({"model": "m", "prompt": p, "max_tokens": 1, "stream": True}).encode() for p in prompts]
    selector = selectors.DefaultSelector()
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in bodies]
    began = time.perf_counter()
    for each, body in zip(sockets, bodies, strict=True):
        each.sendall(HEAD.format(len(body)).encode() + body)
        selector.register(each, selectors.EVENT_READ, bytearray())
    left, last = len(sockets), began
    while left:
        for key, _ in selector.select(60):
            received = key.data
            received += key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            if b" 200 " not in received[:20]:
                raise RuntimeError(f"not a 200: {bytes(received[:300])!r}")
            if b"data: " in received:
                last = time.perf_counter()
                selector.unregister(key.fileobj)
                left -= 1
    for each in sockets:
        each.close()
    return 1e3 * (last - began)


def served(folder: Path, against: list[Path], loads: list[str], rounds: int, prefill_ms: str) -> None:
    """Ask all servers in turn, text and ids in turn, and print what came of it."""
    trees = [*against, None]
    names = ["this" if tree is None else tree.resolve().name for tree in trees]
    source, took = Source(folder), {}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server(folder, tree, prefill_ms=prefill_ms)) for tree in trees]
        begin = {load: Prefix(source, load) for load in loads}
        for round_, load in [(r, load) for load in loads for r in range(rounds + 1)]:
            num = begin[load].num
            for name, (port, pid) in zip(names, servers, strict=True):
                for kind in ("ids", "text"):
                    prompts = begin[load].prompts(kind)
                    cpu = cpu_s(pid)
                    ms = first_event_ms(port, prompts)
                    if round_:  # the first one is the first of its kind
                        cell = took.setdefault((num, load.split("x")[1], name, kind), [])
                        cell.append((ms, 1e3 * (cpu_s(pid) - cpu) / num))
    table = Table(title="From sending to the first event of the last prompt")
    for column in ("prompts", "tokens", "tree", "as", "least ms", "median ms", "cpu ms a prompt"):
        table.add_column(column, justify="right")
    for (num, num_tokens, name, kind), cells in took.items():
        ms, cpu_ms = [cell[0] for cell in cells], [cell[1] for cell in cells]
        numbers = f"{min(ms):.1f}", f"{statistics.median(ms):.1f}", f"{statistics.median(cpu_ms):.2f}"
        table.add_row(str(num), num_tokens, name, kind, *numbers)
    Console(width=120).print(table)


def first_tokens_ms(port: int, prompts: list[Any], num_streams: int) -> list[float]:
    """Send all prompts, so many at a time, each as another one's reply has ended; return when their replies began."""
    bodies = [
        json.dumps({"model": "m", "prompt": p, "max_tokens": NUM_NEW, "stream": True, "ignore_eos": True}).encode()
        for p in prompts
    ]
    selector, took = selectors.DefaultSelector(), []

    def send(connection: socket.socket) -> None:
        body = bodies.pop()
        connection.sendall(HEAD.format(len(body)).encode() + body)
        began[connection], begun[connection], end[connection] = time.perf_counter(), False, b""

    began, begun, end = dict[Any, float](), dict[Any, bool](), dict[Any, bytes]()
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_streams)]
    for each in sockets:
        send(each)
        selector.register(each, selectors.EVENT_READ)
    while len(took) < len(prompts) or selector.get_map():
        for key, _ in selector.select(60):
            each: Any = key.fileobj
            data = each.recv(1 << 16)
            if not data:
                raise RuntimeError("a stream was cut off")
            if not begun[each] and b"data: " in end[each] + data:
                begun[each] = True
                took.append(1e3 * (time.perf_counter() - began[each]))
            end[each] = (end[each] + data)[-1024:]
            if end[each].endswith(b"\r\n0\r\n\r\n"):
                if bodies:
                    send(each)
                else:
                    selector.unregister(each)
    for each in sockets:
        each.close()
    return took


def streams(folder: Path, against: list[Path], loads: list[str], rounds: int) -> None:
    """Keep streams running on all servers in turn, of text and of ids in turn, and print when replies began."""
    trees = [*against, None]
    names = ["this" if tree is None else tree.resolve().name for tree in trees]
    source, took = Source(folder), {}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server(folder, tree, TICK_S)) for tree in trees]
        for load in [each for each in loads for _ in range(rounds)]:
            num = int(load.split("x")[0])
            for name, (port, pid) in zip(names, servers, strict=True):
                for kind in ("ids", "text"):
                    prompts = [p for _ in range(2) for p in Prefix(source, load).prompts(kind)]
                    cpu = cpu_s(pid)
                    ms = sorted(first_tokens_ms(port, prompts, num))
                    cell = took.setdefault((load, name, kind), [])
                    cell.append((*(ms[len(ms) * p // 100] for p in (50, 90, 99)), 1e3 * (cpu_s(pid) - cpu) / len(ms)))
    table = Table(title=f"First token beside streams of {NUM_NEW} tokens, medians of rounds")
    for column in ("load", "tree", "as", "p50 ms", "p90 ms", "p99 ms", "least p99", "cpu ms a request"):
        table.add_column(column, justify="right")
    for (load, name, kind), cells in took.items():
        p50, p90, p99, cpu = (statistics.median(column) for column in zip(*cells, strict=True))
        least = min(cell[2] for cell in cells)
        table.add_row(load, name, kind, f"{p50:.0f}", f"{p90:.0f}", f"{p99:.0f}", f"{least:.0f}", f"{cpu:.2f}")
    Console(width=120).print(table)


def main() -> int:
    """Parse flags, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["parts", "served", "streams", "serve"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=16_000, help="parts: of a prompt")
    parser.add_argument(
        "--loads",
        nargs="+",
        help="served and streams: prompts x tokens; 64x2048+32 for tokens that all rounds' prompts begin with",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--against", type=Path, nargs="+", default=[], help="other checkouts to take turns with")
    parser.add_argument("--port-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prefill-ms", default="", help="served: time of 16,000 tokens on the device, + of a step")
    parser.add_argument("--tick-s", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "serve":
        return serve(arguments.folder, arguments.port_file, arguments.tick_s, arguments.prefill_ms)
    if arguments.what == "parts":
        parts(arguments.folder, arguments.tokens, arguments.rounds)
    elif arguments.what == "streams":
        streams(arguments.folder, arguments.against, arguments.loads or ["64x200", "256x200"], arguments.rounds)
    else:
        loads = arguments.loads or ["1x16000", "16x512", "64x512"]
        served(arguments.folder, arguments.against, loads, arguments.rounds, arguments.prefill_ms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
