"""What ten times the load that a server can take does to what it completes, with the demo model on this machine.

    python tests/bench/overload.py --rounds 3

Rounds alternate between as many requests as the server holds, one after the other (what it can do, nothing refused),
and requests at ten times the rate of that, whatever comes back. Reported are the ratio of what was completed, how long
refusals took, and what part of a core the HTTP process used: on a machine with other work the ratio is noise.
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


class Client:
    """Plain HTTP/1.1 over kept connections; as little work per request as possible, for it shares the cores."""

    def __init__(self, port: int, max_tokens: int) -> None:
        body = json.dumps({**BODY, "max_tokens": max_tokens}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        self.request = head.encode() + b"\r\n\r\n" + body
        self.port = port
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self) -> int:
        """Send the request and read the reply; return its status."""
        try:
            if self.free:
                return await self.exchange(*self.free.pop())
        except (asyncio.IncompleteReadError, ConnectionError):
            self.free.clear()  # idle for too long, the server has closed it
        return await self.exchange(*await asyncio.open_connection("127.0.0.1", self.port))

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(self.request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        if b"connection: close" in head:
            writer.close()
        else:
            self.free.append((reader, writer))
        return int(head.split(b" ", 2)[1])


async def closed(client: Client, count: int, seconds: float) -> float:
    """Keep `count` requests in flight; return completions per second."""
    done, until = 0, time.perf_counter() + seconds

    async def one() -> None:
        nonlocal done
        while time.perf_counter() < until:
            if await client.send() != 200:
                raise RuntimeError("a request was refused although the server holds so many")
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return done / (time.perf_counter() - began)


async def opened(client: Client, rate: float, seconds: float) -> tuple[float, list[float], float]:
    """Send at a rate; return completions per second, the times of refusals, and the rate that was reached."""
    done: list[float] = []
    refused: list[float] = []
    others: list[int] = []

    async def one() -> None:
        began = time.perf_counter()
        status = await client.send()
        now = time.perf_counter()
        if status == 200:
            done.append(now)
        elif status == 429:
            refused.append(now - began)
        else:
            others.append(status)

    began = time.perf_counter()
    tasks: set[asyncio.Task[None]] = set()
    num_sent = 0
    while (now := time.perf_counter() - began) < seconds:
        while num_sent < now * rate:
            task = asyncio.create_task(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            num_sent += 1
        await asyncio.sleep(0.002)
    reached = num_sent / (time.perf_counter() - began)
    await asyncio.gather(*tasks)
    if others:
        raise RuntimeError(f"{len(others)} replies were neither 200 nor 429, such as {others[0]}")
    # All that began counts, over the time until the last ended: the tail runs with ever fewer requests in both rounds.
    return len(done) / (max(done) - began), refused, reached


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


async def measure(arguments: argparse.Namespace, held: int, pid: int) -> None:
    client = Client(arguments.port, arguments.max_tokens)
    await closed(client, held, 2.0)
    cores = Cores(pid)
    plain, loaded, refusals = [], [], []
    for _ in range(arguments.rounds):
        plain.append(await closed(client, held, arguments.seconds))
        alone = cores.since()
        goodput, refused, reached = await opened(client, 10 * plain[-1], arguments.seconds)
        loaded.append(goodput)
        refusals += refused
        print(f"{plain[-1]:.1f} requests/s alone, {alone:.1%} of a core for HTTP; offered {reached:.0f}/s:", end=" ")
        print(f"{goodput:.1f} requests/s completed, {len(refused)} refused, {cores.since():.1%} of a core", flush=True)
    p50, p99 = statistics.median(refusals), statistics.quantiles(refusals, n=100)[98]
    ratio = statistics.mean(loaded) / statistics.mean(plain)
    print(f"goodput at 10x: {ratio:.1%} of what it is without; refusals p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--queued", type=int, default=8)
    parser.add_argument("--port", type=int, default=30217)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--max-running-requests", str(arguments.running), "--max-queued-requests", str(arguments.queued)]
        server = Server(Path(folder), arguments.port, *flags)
        try:
            server.wait()
            asyncio.run(measure(arguments, arguments.running + arguments.queued, server.process.pid))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
