"""One client process: `python -m dovetail_server.bench.worker`, a job on standard input, reports on standard output."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from typing import BinaryIO

import aiohttp
import msgspec

from dovetail_server.bench.jobs import LENGTH, ClientPlan, ClientResult, Progress, Record, Report, Shot, Warm, frame
from dovetail_server.bench.stream import StreamScan
from dovetail_server.bench.wire import counts_of, error_of

PROGRESS_S = 0.25
IDLE_S = 2.0
"""A connection that was idle for longer is opened anew: servers close theirs after five seconds, or a few."""
clock = time.monotonic
"""The same clock in every process of a machine."""


class Client:
    """Sends shots and keeps what became of them."""

    def __init__(self, session: aiohttp.ClientSession, job: ClientPlan) -> None:
        self.session = session
        self.job = job
        self.num_done = 0

    async def run(self, shots: list[Shot], start: float) -> list[Record]:
        """Send all shots, each at its time or when a place is free."""
        if shots and shots[0].at is not None:
            return list(await asyncio.gather(*(self._at(shot, start + (shot.at or 0.0)) for shot in shots)))
        records: list[Record] = []
        queue = iter(shots)

        async def place() -> None:
            for shot in queue:
                records.append(await self.send(shot))

        await asyncio.gather(*(place() for _ in range(min(self.job.slots, len(shots)))))
        return records

    async def _at(self, shot: Shot, due_s: float) -> Record:
        await asyncio.sleep(due_s - clock())
        return await self.send(shot)

    async def send(self, shot: Shot) -> Record:
        """Send one request and read its reply; what goes wrong is in the record."""
        record = Record(index=shot.index, start=clock())
        try:
            async with self.session.post(self.job.url, data=shot.body) as response:
                if response.status != 200:
                    record.error = f"HTTP {response.status}: {problem(await response.read())}"
                elif self.job.stream:
                    await self._read_stream(response, record, shot)
                else:
                    take_whole(await response.read(), record)
        except TimeoutError:
            record.error = f"no reply within {self.job.timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.end = clock()
        self.num_done += 1
        return record

    async def _read_stream(self, response: aiohttp.ClientResponse, record: Record, shot: Shot) -> None:
        scan = StreamScan(counts_events=shot.counts_events)
        read, feed = response.content.readany, scan.feed
        while data := await read():
            feed(data, clock())
        record.error = scan.close()
        record.first, record.last = scan.first, scan.last
        record.num_events, record.tokens_at_first = scan.num_events, scan.tokens_at_first
        record.gaps, record.gap_tokens = scan.gaps, scan.gap_tokens
        if scan.counts is not None:
            record.prompt_tokens, record.completion_tokens = scan.counts.prompt, scan.counts.completion
            record.cached_tokens = scan.counts.cached


def problem(data: bytes) -> str:
    """Return the message in the body of an error."""
    try:
        reply = json.loads(data)
    except ValueError:
        return " ".join(data.decode("utf-8", "replace").split())[:200] or "no body"
    return " ".join((error_of(reply) or str(reply)).split())[:300]


def take_whole(data: bytes, record: Record) -> None:
    """Read the counts of a reply that came in one piece."""
    try:
        reply = json.loads(data)
    except ValueError:
        record.error = f"the reply is no JSON: {data[:80]!r}"
        return
    counts = counts_of(reply)
    if counts is None:
        record.error = error_of(reply) or "the server reports no usage"
        return
    record.prompt_tokens, record.completion_tokens, record.cached_tokens = (
        counts.prompt,
        counts.completion,
        counts.cached,
    )


def read_frame(source: BinaryIO) -> bytes:
    """Read one message; empty at the end."""
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def send(report: Report) -> None:
    """Send a report to the driving process."""
    sys.stdout.buffer.write(frame(report))
    sys.stdout.buffer.flush()


async def send_progress(client: Client) -> None:
    """Report now and then until cancelled."""
    while True:
        await asyncio.sleep(PROGRESS_S)
        send(Progress(done=client.num_done))


def open_session(headers: dict[str, str], timeout_s: float) -> aiohttp.ClientSession:
    """Open a session without a limit of connections, proxies or cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        trust_env=False,
    )


async def work(job: ClientPlan) -> None:
    """Warm up, wait for the start, send everything."""
    async with open_session(job.headers, job.timeout_s) as session:
        client = Client(session, job)
        warm = await client.run(job.warmup, clock())
        send(Warm(errors=[record.error for record in warm if record.error is not None]))
        go = await asyncio.to_thread(read_frame, sys.stdin.buffer)
        if not go:
            return
        start: float = msgspec.msgpack.decode(go, type=float)
        client.num_done = 0
        progress = asyncio.create_task(send_progress(client))
        await asyncio.sleep(start - clock())
        began, used = clock(), time.process_time()
        records = await client.run(job.shots, start)
        busy = (time.process_time() - used) / max(clock() - began, 1e-9)
        progress.cancel()
        send(ClientResult(records=records, busy=busy))


def loop_runner() -> asyncio.Runner:
    """Return a runner on uvloop where it is installed, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def main() -> int:
    """Do the one job that is read from standard input."""
    data = read_frame(sys.stdin.buffer)
    if not data:
        return 1
    job = msgspec.msgpack.decode(data, type=ClientPlan)
    with suppress(KeyboardInterrupt), loop_runner() as runner:
        runner.run(work(job))
    return 0


if __name__ == "__main__":
    sys.exit(main())
