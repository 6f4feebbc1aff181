"""What ten times the load that a server can take does to what it completes, with the demo model on this machine.

    python tests/benchmarks/overload.py

Rounds alternate between as many requests as the server holds, one after the other (what it can do, nothing refused),
and requests at ten times the rate of that, whatever comes back. Reported are the ratio of what was completed, how long
refusals took, and what part of a core the HTTP process used. On a machine with other work the ratio is noise; what the
engine completed per second of its own computing is less so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from batches import Server

BODY = {"model": "dovetail-demo", "prompt": "Count: one, two, three,", "ignore_eos": True, "temperature": 0}


WARM_S = 2.0
"""What completes in the first seconds of a round does not count: batches fill up."""


class Client:
    """Plain HTTP/1.1 over kept connections; as little work per request as possible, for it shares the cores."""

    def __init__(self, port: int, max_tokens: int) -> None:
        # Lengths vary, so that requests do not all end at the same step.
        self.lengths = [max_tokens * share // 4 for share in (2, 3, 4, 5, 6)]
        self.requests = [self.request_of(length) for length in self.lengths]
        self.port = port
        self.num_sent = 0
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @staticmethod
    def request_of(max_tokens: int) -> bytes:
        body = json.dumps({**BODY, "max_tokens": max_tokens}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def send(self) -> tuple[int, int]:
        """Send a request and read the reply; return its status and tokens."""
        index = self.num_sent % len(self.requests)
        self.num_sent += 1
        request, length = self.requests[index], self.lengths[index]
        try:
            if self.free:
                return await self.exchange(request, *self.free.pop()), length
        except (asyncio.IncompleteReadError, ConnectionError):
            self.free.clear()  # idle for too long, the server has closed it
        return await self.exchange(request, *await asyncio.open_connection("127.0.0.1", self.port)), length

    async def exchange(self, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        if b"connection: close" in head:
            writer.close()
        else:
            self.free.append((reader, writer))
        return int(head.split(b" ", 2)[1])


class Done:
    """What was completed, by when."""

    def __init__(self, seconds: float) -> None:
        self.began = time.perf_counter()
        self.until = self.began + seconds
        self.items: list[tuple[float, int]] = []

    def add(self, num_tokens: int) -> None:
        self.items.append((time.perf_counter(), num_tokens))

    @property
    def tokens_per_s(self) -> float:
        """While the load lasted: from the end of one request to that of another."""
        found = [item for item in self.items if self.began + WARM_S <= item[0] <= self.until]
        return sum(tokens for _, tokens in found[1:]) / (found[-1][0] - found[0][0])


async def closed(client: Client, count: int, seconds: float) -> float:
    """Keep `count` requests in flight; return completed tokens per second."""
    done = Done(seconds)

    async def one() -> None:
        while time.perf_counter() < done.until:
            status, num_tokens = await client.send()
            if status != 200:
                raise RuntimeError("a request was refused although the server holds so many")
            done.add(num_tokens)

    await asyncio.gather(*(one() for _ in range(count)))
    return done.tokens_per_s


async def opened(client: Client, rate: float, seconds: float) -> tuple[float, list[float], float]:
    """Send at a rate; return completed tokens per second, the times of refusals, and the rate that was reached."""
    done = Done(seconds)
    refused: list[float] = []
    others: list[int] = []

    async def one() -> None:
        began = time.perf_counter()
        status, num_tokens = await client.send()
        if status == 200:
            done.add(num_tokens)
        elif status == 429:
            refused.append(time.perf_counter() - began)
        else:
            others.append(status)

    tasks: set[asyncio.Task[None]] = set()
    num_sent = 0
    while (now := time.perf_counter()) < done.until:
        while num_sent < (now - done.began) * rate:
            task = asyncio.create_task(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            num_sent += 1
        await asyncio.sleep(0.002)
    reached = num_sent / (time.perf_counter() - done.began)
    await asyncio.gather(*tasks)
    if others:
        raise RuntimeError(f"{len(others)} replies were neither 200 nor 429, such as {others[0]}")
    return done.tokens_per_s, refused, reached


class Cores:
    """What part of a core a process has used since it was asked last."""

    def __init__(self, pid: int) -> None:
        self.path = Path(f"/proc/{pid}/stat")
        self.used, self.at = self.read(), time.perf_counter()

    def read(self) -> float:
        fields = self.path.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def since(self) -> float:
        used, at = self.read(), time.perf_counter()
        part = (used - self.used) / (at - self.at)
        self.used, self.at = used, at
        return part


async def measure(arguments: argparse.Namespace, held: int, server: Server) -> None:
    client = Client(arguments.port, arguments.max_tokens)
    await closed(client, held, WARM_S + 2)
    http, engine = Cores(server.process.pid), Cores(server.engine_pids()[0])
    plain: list[tuple[float, float]] = []
    loaded: list[tuple[float, float]] = []
    refusals: list[float] = []
    for _ in range(arguments.rounds):
        goodput = await closed(client, held, arguments.seconds)
        alone = http.since()
        plain.append((goodput, goodput / engine.since()))
        goodput, refused, reached = await opened(client, 10 * goodput / arguments.max_tokens, arguments.seconds)
        loaded.append((goodput, goodput / engine.since()))
        refusals += refused
        print(f"{plain[-1][0]:.0f} tokens/s alone, {alone:.1%} of a core for HTTP; {reached:.0f} requests/s:", end=" ")
        print(f"{goodput:.0f} tokens/s completed, {len(refused)} refused, {http.since():.1%} of a core", flush=True)
    p50, p99 = statistics.median(refusals), statistics.quantiles(refusals, n=100)[98]
    by_time, by_cpu = (statistics.mean(b[i] for b in loaded) / statistics.mean(a[i] for a in plain) for i in (0, 1))
    print(f"goodput at 10x, of what it is without: {by_time:.1%}; per second that the engine computed: {by_cpu:.1%}")
    print(f"refusals: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--max-tokens", type=int, default=64, help="on average")
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--queued", type=int, default=8)
    parser.add_argument("--port", type=int, default=30217)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--max-running-requests", str(arguments.running), "--max-queued-requests", str(arguments.queued)]
        server = Server(Path(folder), arguments.port, *flags)
        try:
            server.wait()
            asyncio.run(measure(arguments, arguments.running + arguments.queued, server))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
