"""What `dovetail bench serve` itself costs: `python tests/benchmarks/bench_client.py [--streams 64] [--tokens 256]`.

A fake server sends ready-made events as fast as it can, or at a fixed rate per stream; the client processes measure it
as they would a real one. Printed is the client's CPU time per event, which bounds what one client process can follow.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time

from dovetail_server.bench import prompts
from dovetail_server.bench.drive import Run, drive
from dovetail_server.bench.wire import BenchSampling
from dovetail_server.bench.workloads import Workload

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"object":"text_completion","id":"cmpl-0123456789abcdef0123456789abcdef","created":1700000000,'
    b'"model":"fake","system_fingerprint":"fp_0","choices":[{"index":0,"text":" word","logprobs":null,'
    b'"finish_reason":%s}]%s}\n\n'
)
USAGE = b',"usage":{"prompt_tokens":8,"completion_tokens":%d,"total_tokens":9}'


def chunk(data: bytes) -> bytes:
    """Frame a piece of the body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Fake(asyncio.Protocol):
    """Answers every request with `tokens` events, one per write."""

    tokens = 256
    interval = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self.transport = transport
        self.got = b""

    def data_received(self, data: bytes) -> None:
        """Answer when a request is whole."""
        self.got += data
        head, found, body = self.got.partition(b"\r\n\r\n")
        if not found:
            return
        length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
        if len(body) >= length:
            counts = b"continuous_usage_stats" in body
            self.got = body[length:]
            self.task = asyncio.ensure_future(self.answer(counts))

    async def answer(self, counts: bool) -> None:
        """Send the events, one every `interval` seconds."""
        write = self.transport.write
        write(HEAD)
        due = time.monotonic()
        for n in range(1, self.tokens + 1):
            due += self.interval
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            reason = b"null" if n < self.tokens else b'"length"'
            write(chunk(EVENT % (reason, USAGE % n if counts else b"")))
        end = b'data: {"choices":[]%s}\n\ndata: [DONE]\n\n' % (USAGE % self.tokens)
        write(chunk(end) + b"0\r\n\r\n")


async def fake_server(port: int, tokens: int, interval: float) -> None:
    """Serve until killed."""
    Fake.tokens, Fake.interval = tokens, interval
    server = await asyncio.get_running_loop().create_server(Fake, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


async def measure(args: argparse.Namespace) -> None:
    """Drive the fake server and print the client's cost."""
    workload = Workload(
        name="fake",
        num_prompts=args.streams * 2,
        concurrency=args.streams,
        input_len=(8, 8),
        output_len=(args.tokens, args.tokens),
    )
    run = Run(
        base_url=f"http://127.0.0.1:{args.port}",
        endpoint="completions",
        sampling=BenchSampling(model="fake"),
        headers={},
        supports_counts=args.counts,
        seed=1,
        workers=args.workers,
    )
    source = prompts.RandomIds(prompts.PromptVocabulary.of_size(10_000, "fake"), "1")
    seen = await drive(workload, run, source, source, lambda done: None)
    errors = {record.error for record in seen.records}
    events = sum(record.num_events for record in seen.records)
    duration = max(r.end for r in seen.records) - min(r.start for r in seen.records)
    per_event = 1e6 * seen.busy * duration / (events / seen.workers)
    print(
        f"{args.streams} streams, {seen.workers} client processes, errors {errors}: {events:,} events, "
        f"{events / duration:,.0f} a second; busiest client {seen.busy:.0%} of a core, {per_event:.1f} us per event"
    )


def main() -> int:
    """Start the fake server in a process of its own, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--interval-ms", type=float, default=0.0, help="between events of a stream")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--counts", action="store_true", help="let streams count their tokens")
    parser.add_argument("--port", type=int, default=31888)
    parser.add_argument("--only-server", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only_server:
        asyncio.run(fake_server(args.port, args.tokens, args.interval_ms / 1000))
        return 0
    server = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--only-server"], env=dict(os.environ))
    try:
        time.sleep(1.5)
        asyncio.run(measure(args))
    finally:
        server.terminate()
        server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
