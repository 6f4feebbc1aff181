"""Which worker gets a prompt: smg's `cache_aware` policy, asked for its choice only.

smg stands beside the requests, not in their way. It knows one small server for each worker, all in this process, and is
sent the beginning of every prompt, with a ticket. The server that the ticket arrives at is smg's choice, and keeps that
exchange open as long as the request itself runs, so that smg knows each worker's load. So bodies and replies, their
fields and their errors, are the workers' own; when smg ends, no stream does, and requests go to the least busy worker
until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from dovetail.base.distribution import install_extra
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail_server.gateway.fleet import Fleet, Worker
from dovetail_server.gateway.relayed_log import COLOURS

if TYPE_CHECKING:
    from dovetail_server.supervision.supervisor import Supervisor

logger = logging.getLogger("dovetail.server")
MODEL = "dovetail"
CHOICE_S = 2.0
"""smg takes a millisecond or two."""
START_S = 30.0
SAY_EVERY_S = 60.0
LINE_BYTES = 1 << 12
"""Of a line that smg writes, at most so much is kept while its end has not come."""
NEVER = 10**8
"""Seconds: no exchange is ended by a clock of smg."""


def check_installed() -> None:
    """Refuse to start without smg.

    Raises:
        ConfigError: Naming the extra.
    """
    if importlib.util.find_spec("smg") is None:
        raise ConfigError(f"several workers need smg, which is not installed: {install_extra('gateway')}")


class Placement:
    """smg, the small servers that it knows, and the requests that it has placed."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, tasks: Supervisor) -> None:
        """Start nothing yet."""
        self.fleet = fleet
        self.num_placed = 0
        """Requests whose worker smg has chosen."""
        self._session = session
        self._tasks = tasks
        self._tickets: dict[str, tuple[asyncio.Future[Worker], asyncio.Event]] = {}
        self._by_port: dict[int, Worker] = {}
        self._runner: web.AppRunner | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._url: str | None = None
        """Where smg listens; None while it does not know the workers."""
        self._key = secrets.token_hex(24)  # no dash: it stands behind a flag
        self._said = -SAY_EVERY_S
        self.is_up = asyncio.Event()
        self.is_serving = False
        """Requests come. Until then each worker passes for ready: smg would see a second or two late that it is."""

    async def open(self) -> None:
        """Open the small servers."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        for worker in self.fleet.workers:
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            self._by_port[listener.getsockname()[1]] = worker
            await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
        """End smg and the small servers."""
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()  # it has no requests of its own, and would take five seconds to say goodbye
            await process.wait()
        if self._runner is not None:
            await self._runner.cleanup()

    async def keep_smg(self) -> None:
        """Run smg until it ends: the supervisor starts it again.

        Raises:
            DovetailError: It ended.
        """
        port, metrics_port = _free_ports(2)
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dovetail_server.gateway.smg_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,  # a picture, and a log of its own
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        said: deque[str] = deque(maxlen=1)
        lines = self._tasks.start("smg log", _last_line(process.stderr, said))
        try:
            if process.stdin is not None:
                process.stdin.write(json.dumps(self._arguments(port, metrics_port)).encode() + b"\n")
                await process.stdin.drain()
            url = f"http://127.0.0.1:{port}"
            registered = await self._wait_registered(url, process)
            if registered:
                self._url = url
                self.is_up.set()
            code = await process.wait()
            await asyncio.wait({lines}, timeout=1.0)
        finally:
            self._url = None
            lines.cancel()
            if process.returncode is None:
                process.kill()
        raise DovetailError(f"smg ended with code {code}{''.join(f': {line}' for line in said)}")

    def _arguments(self, port: int, metrics_port: int) -> list[str]:
        urls = [f"http://127.0.0.1:{port}" for port in self._by_port]
        return [
            *("--worker-urls", *urls, "--policy", "cache_aware"),
            *("--host", "127.0.0.1", "--port", str(port), "--api-key", self._key),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
            *("--health-success-threshold", "1", "--no-remove-unhealthy-workers"),
            *("--request-timeout-secs", str(NEVER), "--max-concurrent-requests", "0"),
            *("--disable-retries", "--disable-circuit-breaker", "--disable-load-monitoring"),
            *("--disable-tokenizer-autoload", "--history-backend", "none", "--log-level", "error"),
        ]

    async def _wait_registered(self, url: str, process: asyncio.subprocess.Process) -> bool:
        """Wait until smg knows every worker; false if it ends before.

        Raises:
            DovetailError: It does not come to that.
        """
        began = time.monotonic()
        headers = {"authorization": f"Bearer {self._key}"}
        while time.monotonic() - began < START_S:
            if process.returncode is not None:
                return False
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
                async with self._session.get(f"{url}/workers", headers=headers) as reply:
                    body = await reply.json(content_type=None)
                    if reply.status == 200 and body["total"] == len(self.fleet.workers):
                        return True
            await asyncio.sleep(0.05)
        raise DovetailError(f"smg does not know its workers after {START_S:g} s")

    @asynccontextmanager
    async def choose(self, text: str | None) -> AsyncIterator[Worker | None]:
        """Yield smg's choice for a prompt that begins so; None if it made none. It counts as load within the block."""
        url = self._url
        if url is None or not text:
            if url is None:
                self._say("smg is not there")
            yield None
            return
        ticket = secrets.token_hex(16)
        chosen: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        done = asyncio.Event()
        self._tickets[ticket] = chosen, done
        exchange = self._tasks.start("placement", self._exchange(url, ticket, text), is_awaited=True)
        try:
            waited: set[asyncio.Future[Any]] = {chosen, exchange}
            await asyncio.wait(waited, timeout=CHOICE_S, return_when=asyncio.FIRST_COMPLETED)
            if chosen.done():
                self.num_placed += 1
            else:
                self._say(exchange.result() if exchange.done() else f"no answer in {CHOICE_S:g} s")
            yield chosen.result() if chosen.done() else None
        finally:
            del self._tickets[ticket]
            done.set()
            if not chosen.done():
                exchange.cancel()

    async def _exchange(self, url: str, ticket: str, text: str) -> str:
        """Send smg the beginning of a prompt; return its response, which ends with the request."""
        body = {"model": MODEL, "stream": True, "user": ticket, "messages": [{"role": "user", "content": text}]}
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        try:
            async with self._session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
                answer = await reply.content.read(500)
                await reply.read()
                return f"{reply.status} {answer.decode('utf-8', 'replace')}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return str(error)

    def _say(self, why: str) -> None:
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S and self.is_up.is_set():
            self._said = now
            text = "smg chose no worker (%s); requests go to the least busy one, whatever prefixes are cached where."
            logger.warning(text, " ".join(why.split())[:300])

    def _worker(self, request: web.Request) -> Worker:
        transport = request.transport
        name: Sequence[object] = () if transport is None else transport.get_extra_info("sockname")
        return self._by_port[int(str(name[1]))]

    async def _health(self, request: web.Request) -> web.Response:
        is_asked = self.is_serving and self._url is not None  # smg leaves out for 30 s who is not well at first
        return web.Response(status=503 if is_asked and not self._worker(request).is_ready else 200)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "sglang"}]})

    async def _take(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        chosen, done = self._tickets.get(str(body.get("user")), (None, None))
        if chosen is None or done is None:  # not of this process, or abandoned
            return web.Response(status=404)
        if not chosen.done():
            chosen.set_result(self._worker(request))
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        await done.wait()
        with contextlib.suppress(ConnectionError):
            await reply.write(b"data: [DONE]\n\n")
        return reply


async def _last_line(stream: asyncio.StreamReader | None, said: deque[str]) -> None:
    """Keep the last line that smg writes: it says why it ends. All lines are read, or smg would block."""
    rest = b""
    while stream is not None and (piece := await stream.read(LINE_BYTES)):
        *lines, rest = (rest + piece).split(b"\n")
        rest = rest[-LINE_BYTES:]
        for line in (*lines, rest):
            if text := COLOURS.sub("", line.decode("utf-8", "replace")).strip():
                said.append(text[:500])


def _free_ports(num: int) -> list[int]:
    held = [socket.socket() for _ in range(num)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()
