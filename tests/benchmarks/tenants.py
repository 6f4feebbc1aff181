"""Two tenants with colliding identifiers, ends of every sort, a pool that overflows, and an engine that is killed.

Requests have three priorities under a policy that lets the higher ones push out the lower: many are retracted.

Every reply must be what the same request gets alone, and one that was cut off a beginning of it:

    python tests/benchmarks/tenants.py --requests 10000 --kills 10
    python tests/benchmarks/tenants.py --streams 64 --kills 1 [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

KEYS = ("sk-tenant-a", "sk-tenant-b")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FIELDS = {"name": {"type": "string"}, "age": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["name"]}


def kinds(seed: int, tokens: int) -> dict[str, dict[str, Any]]:
    """Bodies of every sort, by name, with at most so many tokens; one has twice as many."""
    word = f"Count to {seed % 7 + 12} and tell me about number {seed}."
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": word}], "max_tokens": tokens, "seed": seed}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    return {
        "greedy": {**chat, "temperature": 0},
        "seeded": {**chat, "top_p": 0.9},
        "long": {**chat, "ignore_eos": True, "max_tokens": 2 * tokens, "frequency_penalty": 0.4},
        "two": {**chat, "n": 2},
        "logprobs": {**chat, "logprobs": True, "top_logprobs": 2, "ignore_eos": True},
        "stop": {**chat, "stop": ["e", "7"], "ignore_eos": True},
        "grammar": {**chat, "response_format": response_format},
        "tools": {**chat, "tools": [TOOL], "tool_choice": "required"},
    }


@dataclass
class Tally:
    """What has come of it."""

    ends: Counter[str] = field(default_factory=Counter)
    differ: list[str] = field(default_factory=list)


class Server:
    """`dovetail serve` with the demo model."""

    def __init__(self, folder: Path, port: int, flags: list[str]) -> None:
        self.base = f"http://127.0.0.1:{port}"
        keys = [part for key in KEYS for part in ("--api-key", key)]
        command = [sys.executable, "-m", "dovetail_server", "serve", "--port", str(port), *keys, *flags]
        command += ["--file-storage-path", str(folder), "--log-level", "warning", "--disable-access-log"]
        self.process = subprocess.Popen(command)

    async def ready(self) -> None:
        """Wait until it serves."""
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEYS[0]}"}) as http:
            for _ in range(3000):
                try:
                    async with http.get(self.base + "/readyz") as reply:
                        if reply.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
        raise SystemExit("the server did not get ready")

    def kill_engine(self) -> bool:
        """SIGKILL to the engine, if there is one."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        for child in children:
            if b"dovetail_server.supervision.engine_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
                return True
        return False

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(120)


class BusyError(Exception):
    """The identifier still belongs to the reply that this client has left: it is to try again."""


async def ask(http: aiohttp.ClientSession, base: str, key: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    """What a stream's choices bring: (index, piece); an error raises."""
    headers = {"authorization": f"Bearer {key}"}
    async with http.post(base + "/v1/chat/completions", json={**body, "stream": True}, headers=headers) as reply:
        if reply.status == 409:
            raise BusyError
        if reply.status != 200:
            raise RuntimeError(f"{reply.status} {await reply.text()}")
        async for line in reply.content:
            if line.startswith(b"data: {"):
                data = json.loads(line[6:])
                if "error" in data:
                    raise RuntimeError(line.decode())
                for choice in data["choices"]:
                    yield choice["index"], choice


def piece(choice: dict[str, Any]) -> str:
    """A chunk as text that adds up: content, calls without their random ids, tokens of log probabilities, the end."""
    delta = choice.get("delta") or {}
    calls = "".join(
        (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        for call in delta.get("tool_calls") or ()
    )
    end = f"<{choice['finish_reason']}>" if choice.get("finish_reason") else ""
    return (delta.get("content") or "") + (delta.get("reasoning_content") or "") + calls + end


@dataclass
class Reply:
    """The texts of a reply's choices, with their tokens if asked for; whether the client left before its end."""

    texts: list[str]
    is_left: bool = False

    def is_like(self, want: list[str]) -> bool:
        """Whether it is what the same request got alone, or the beginning of it."""
        if self.is_left:
            return all(w.startswith(text) for text, w in zip(self.texts, want, strict=False))
        return self.texts == want


async def whole(
    http: aiohttp.ClientSession, base: str, key: str, body: dict[str, Any], leave_at: tuple[int, float] | None = None
) -> Reply:
    """Read a reply; `leave_at`: close the connection after so many pieces, or so many seconds."""
    texts: dict[int, str] = {}
    logged: dict[int, list[str]] = {}
    most, seconds = leave_at or (1 << 30, 3600.0)
    count = 0
    try:
        async with asyncio.timeout(seconds), aclosing(ask(http, base, key, body)) as pieces:
            async for index, choice in pieces:
                texts[index] = texts.get(index, "") + piece(choice)
                for row in ((choice.get("logprobs") or {}).get("content")) or ():
                    logged.setdefault(index, []).append(row["token"])
                count += 1
                if count >= most:
                    return Reply([texts[i] for i in sorted(texts)], is_left=True)
    except TimeoutError:
        return Reply([texts.get(i, "") for i in range(max(texts, default=-1) + 1)], is_left=True)
    return Reply([texts[i] + "|" + "".join(logged.get(i, ())) for i in sorted(texts)])


async def alone(server: Server, bodies: dict[tuple[str, int], dict[str, Any]]) -> dict[tuple[str, int], list[str]]:
    """What each gets by itself."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(3600)) as http:
        return {name: (await whole(http, server.base, KEYS[0], body)).texts for name, body in bodies.items()}


async def patiently(
    http: aiohttp.ClientSession,
    base: str,
    key: str,
    body: dict[str, Any],
    leave_at: tuple[int, float] | None,
    tally: Tally,
) -> Reply:
    """As `whole`; until the server knows that a client has left, its identifier is taken."""
    for _ in range(600):
        try:
            return await whole(http, base, key, body, leave_at)
        except BusyError:
            tally.ends["told to wait"] += 1
            await asyncio.sleep(0.1)
    raise RuntimeError("the identifier stayed taken")


async def load(server: Server, args: argparse.Namespace) -> Tally:
    """Run all of it."""
    rng, tally = random.Random(args.seed), Tally()
    bodies = {(kind, i): body for i in range(args.prompts) for kind, body in kinds(i, args.tokens).items()}
    began = time.monotonic()
    want = await alone(server, bodies)
    print(f"{len(bodies)} requests alone: {time.monotonic() - began:.0f} s", flush=True)
    left = iter(range(args.requests))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(3600)) as http:

        async def worker(number: int) -> None:
            key, rid = KEYS[number % 2], str(number // 2)  # the other tenant's worker beside it has the same
            for _ in left:
                name = rng.choice(list(bodies))
                body = {**bodies[name], "rid": rid, "priority": rng.randrange(3)}
                leaves = rng.random() < args.leave
                leave_at = (rng.randrange(1, 9), rng.uniform(0.05, 5)) if leaves else None
                try:
                    got = await patiently(http, server.base, key, body, leave_at, tally)
                except (RuntimeError, aiohttp.ClientError) as error:
                    tally.differ.append(f"{name}: {error}")
                    tally.ends["error"] += 1
                    continue
                tally.ends["left" if got.is_left else "whole"] += 1
                if not got.is_like(want[name]):
                    tally.differ.append(f"{name}: {got!r} is not {want[name]!r}")

        async def killer() -> None:
            for _ in range(args.kills):
                await asyncio.sleep(rng.uniform(args.every / 2, args.every * 1.5))
                tally.ends["kills"] += server.kill_engine()

        killing = asyncio.create_task(killer())
        await asyncio.gather(*(worker(i) for i in range(args.streams)))
        killing.cancel()
    return tally


async def run(args: argparse.Namespace) -> int:
    """Serve, load, compare, and show a table."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--dtype", args.dtype, "--max-total-tokens", str(args.pool), "--num-threads", "1"]
        flags += [
            "--schedule-policy",
            "priority",
            "--max-engine-restarts",
            "1000",
            "--max-running-requests",
            str(args.running),
        ]
        server = Server(Path(folder), args.port, flags)
        try:
            await server.ready()
            began = time.monotonic()
            tally = await load(server, args)
            took_s = time.monotonic() - began
            async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEYS[0]}"}) as http:
                async with http.get(server.base + "/metrics") as reply:
                    metrics = await reply.text()
                async with http.get(server.base + "/server_info") as reply:
                    state = (await reply.json())["internal_states"][0]
        finally:
            code = server.end()
    restarts = [line.split()[-1] for line in metrics.splitlines() if line.startswith("dovetail_engine_restarts_total")]
    retractions = [line.split()[-1] for line in metrics.splitlines() if line.startswith("dovetail_retractions_total")]
    rows = {
        "replies compared whole": tally.ends["whole"],
        "clients that left": tally.ends["left"],
        "told to wait for a rid": tally.ends["told to wait"],
        "errors": tally.ends["error"],
        "replies that differ": len(tally.differ),
        "kills": tally.ends["kills"],
        "restarts": restarts[0],
        "retractions": retractions[0],
        "tokens held at the end": state["num_used_tokens"],
        "exit code": code,
        "seconds": round(took_s),
    }
    print("\n".join(f"{name:26}{value:>10}" for name, value in rows.items()))
    for line in tally.differ[:10]:
        print("  " + line[:600])
    return 1 if tally.differ or tally.ends["error"] else 0


def main() -> int:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=64, help="at once, half of them each tenant's")
    parser.add_argument("--prompts", type=int, default=6, help="different ones of each sort")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--every", type=float, default=25.0, help="seconds between two kills, about")
    parser.add_argument("--leave", type=float, default=0.2, help="part of the clients that leave in the middle")
    parser.add_argument("--running", type=int, default=48)
    parser.add_argument("--pool", type=int, default=3072, help="tokens of the KV cache: few, so that it overflows")
    parser.add_argument("--tokens", type=int, default=90, help="most of a reply; some get twice as many")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, default=31571)
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
