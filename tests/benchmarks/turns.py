"""Whether keys take turns over HTTP: times to the first token of many keys, without and with one that floods it.

    python tests/benchmarks/turns.py --seconds 20 --policy lpm

The demo model is served with 16 rows and 100 keys. First 99 keys send short requests now and then; then they do so
again while one key has 4,000 requests of 600 tokens open. At last four keys with weights 1 to 4 flood it with requests
of 40 tokens, and what each got of the next `--tokens` is held against its share: keys may be ahead of it by a thousand.
How long a step took beside the flood is read off the engine's counter, since other work on the machine changes it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp

from dovetail_server.tenants.keys_file import key_hash

FLOOD, BOSS = "sk-flood", "sk-boss"
OTHERS = [f"sk-{i}" for i in range(99)]
WEIGHED = [f"sk-weight-{i}" for i in range(1, 5)]


class Server:
    """`dovetail serve` with the demo model, in a process."""

    def __init__(self, folder: Path, policy: str) -> None:
        weights = {key: float(key[-1]) for key in WEIGHED}
        names = [FLOOD, *OTHERS, *WEIGHED, BOSS]
        keys = [{"name": n, "hash": f"sha256:{key_hash(n)}", "weight": weights.get(n, 1.0)} for n in names]
        keys[-1]["roles"] = ["admin"]
        file = folder / "keys.yaml"
        file.write_text(json.dumps({"keys": keys}), encoding="utf-8")
        flags = ["--port", "31173", "--max-running-requests", "16", "--schedule-policy", policy]
        flags += ["--keys-file", str(file), "--file-storage-path", str(folder / "files"), "--disable-access-log"]
        flags += ["--max-connections", "6000", "--max-connections-per-address", "6000", "--log-level", "warning"]
        self.base = "http://127.0.0.1:31173"
        self.process = subprocess.Popen([sys.executable, "-m", "dovetail_server", "serve", *flags])

    async def ready(self, http: aiohttp.ClientSession) -> None:
        """Wait until it serves."""
        async with asyncio.timeout(120):
            while True:
                with suppress(aiohttp.ClientError):
                    async with http.get(self.base + "/readyz") as reply:
                        if reply.status == 200:
                            return
                if self.process.poll() is not None:
                    raise SystemExit("the server ended")
                await asyncio.sleep(0.2)


async def ask(http: aiohttp.ClientSession, base: str, key: str, prompt: str, num: int) -> float:
    """Send a request; returns the seconds to its first token."""
    body = {"prompt": prompt, "max_tokens": num, "ignore_eos": True, "stream": True}
    began, first = time.perf_counter(), 0.0
    async with http.post(f"{base}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{reply.status} {(await reply.text())[:200]}")
        async for line in reply.content:
            if not first and line.startswith(b"data: {"):
                first = time.perf_counter() - began
    return first


async def others(http: aiohttp.ClientSession, base: str, seconds: float, rate: float) -> list[float]:
    """Times to the first tokens of keys that send requests of 4 tokens at random times."""
    rng, tasks, end = random.Random(4), [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        prompt = " ".join(str(rng.randrange(1000)) for _ in range(8))
        tasks.append(asyncio.create_task(ask(http, base, rng.choice(OTHERS), prompt, 4)))
        await asyncio.sleep(rng.expovariate(rate))
    return sorted(await asyncio.gather(*tasks))


def told(what: str, times: list[float]) -> float:
    """Print the median and the 99th percentile; returns the latter."""
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    print(f"{what:<34} {len(times):5} requests  p50 {p50 * 1000:7.1f} ms  p99 {p99 * 1000:7.1f} ms", flush=True)
    return p99


async def flooded(
    http: aiohttp.ClientSession, base: str, keys: list[str], num: int, length: int, work: Callable[[], Awaitable[Any]]
) -> Any:
    """Do something while each of some keys has `num` requests of `length` tokens open, in a process of their own.

    Their lines would take the time of the process that measures.
    """
    flood = get_context("spawn").Process(target=run_flood, args=(base, keys, num, length), daemon=True)
    flood.start()
    wanted = min(num * len(keys), 4096) * 0.98  # all are queued: HTTP itself takes turns by connection
    for _ in range(600):
        live = await usage(http, base, "running_requests")
        if sum(live.get(key, 0) for key in keys) >= wanted:
            break
        await asyncio.sleep(0.5)
    try:
        return await work()
    finally:
        flood.terminate()
        flood.join()


def run_flood(base: str, keys: list[str], num: int, length: int) -> None:
    """Be the process of a flood: hold all requests open, and send each that ends once more."""

    async def repeat(http: aiohttp.ClientSession, key: str, number: int) -> None:
        while True:
            try:
                await ask(http, base, key, f"{number} is a number", length)
            except (aiohttp.ClientError, RuntimeError) as error:
                if number == 0:  # of thousands that fail alike
                    print(f"a request of the flood failed: {error}", flush=True)
                await asyncio.sleep(1)

    async def main() -> None:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            await asyncio.gather(*(repeat(http, key, number) for number in range(num) for key in keys))

    asyncio.run(main())


async def look(http: aiohttp.ClientSession, base: str, path: str) -> str:
    """What an admin is told; asked once more where the server closed an idle connection at that moment."""
    for is_last in (False, False, True):
        try:
            async with http.get(base + path, headers={"authorization": f"Bearer {BOSS}"}) as reply:
                return await reply.text()
        except aiohttp.ClientConnectionError:
            if is_last:
                raise
    raise AssertionError


async def usage(http: aiohttp.ClientSession, base: str, what: str = "output_tokens") -> dict[str, int]:
    """A number of each key."""
    return {row["name"]: row[what] for row in json.loads(await look(http, base, "/v1/usage"))["data"]}


async def num_steps(http: aiohttp.ClientSession, base: str) -> int:
    """How many steps the engine has made."""
    lines = (await look(http, base, "/metrics")).splitlines()
    return int(float(next(line.split()[-1] for line in lines if line.startswith("dovetail_engine_step{"))))


async def run(args: argparse.Namespace) -> int:
    """Measure; returns 1 where a bound does not hold."""
    with tempfile.TemporaryDirectory() as name:
        server = Server(Path(name), args.policy)
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
                await server.ready(http)
                await others(http, server.base, 3, args.rate)
                alone = told(f"{len(OTHERS)} keys alone", await others(http, server.base, args.seconds, args.rate))

                async def again() -> tuple[list[float], float]:
                    before, began = await num_steps(http, server.base), time.perf_counter()
                    times = await others(http, server.base, args.seconds, args.rate)
                    return times, (time.perf_counter() - began) / (await num_steps(http, server.base) - before)

                times, step_s = await flooded(http, server.base, [FLOOD], args.requests, 600, again)
                p99 = told(f"… and one with {args.requests} requests", times)

                async def shares() -> dict[str, int]:
                    await asyncio.sleep(args.seconds / 2)
                    before, got = await usage(http, server.base), dict.fromkeys(WEIGHED, 0)
                    while sum(got.values()) < args.tokens:
                        await asyncio.sleep(args.seconds / 10)
                        after = await usage(http, server.base)
                        got = {key: after[key] - before.get(key, 0) for key in WEIGHED}
                    return got

                got = await flooded(http, server.base, WEIGHED, 400, 40, shares)
                all_tokens, off = sum(got.values()), 0.0
                for key, num in got.items():
                    share = num / all_tokens / (float(key[-1]) / 10)
                    off = max(off, abs(share - 1))
                    print(f"weight {key[-1]}: {num} of {all_tokens} tokens, {share:.2f} of its share")
                bound = 2 * alone + 5 * step_s
                print(f"p99 {p99 * 1000:.1f} ms, at most {bound * 1000:.1f} ms with steps of {step_s * 1000:.0f} ms")
                return int(p99 > bound or off > 0.1)
        finally:
            server.process.terminate()
            server.process.wait(60)


def main() -> int:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="fcfs", help="schedule policy")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--tokens", type=int, default=20_000, help="after which keys are held against their shares")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second of the 99 keys together")
    parser.add_argument("--requests", type=int, default=4000, help="of the key that floods")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
