"""Routes that concern every worker: probes, metrics, loads, and commands that all of them get."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import dovetail
from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.http.auth import CALLER
from dovetail_server.http.shown import shown
from dovetail_server.routes.health import answer, probe_routes

if TYPE_CHECKING:
    from dovetail_server.gateway.fleet import Worker
    from dovetail_server.gateway.state import GatewayState

# One `/metrics` of all workers: their series, each with the label `worker`.

SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*?\})?(?= [^}]*$)")
SUFFIXES = ("_bucket", "_sum", "_count", "_created", "_total")


def merged(texts: dict[str, str]) -> str:
    """Put together what workers publish in Prometheus' text format.

    Args:
        texts: By the worker's number.

    Returns:
        The families in the order of the first worker that has them, each with its help and type once.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head and len(head) < 2:
                    head.append(line)
            elif line and not line.startswith("#") and (found := SAMPLE.match(line)) is not None:
                name, labels = found[1], found[2]
                owner = family if name == family or name.removeprefix(family) in SUFFIXES else name
                inside = f'worker="{number}"' + (f",{labels[1:-1]}" if labels and len(labels) > 2 else "")
                samples.setdefault(owner, []).append(f"{name}{{{inside}}}{line[found.end() :]}")
    lines: list[str] = []
    for family, rows in samples.items():
        lines += heads.get(family, [])
        lines += rows
    return "".join(f"{line}\n" for line in lines)


def own(ready: int, workers: int, starts: int, placed: int) -> str:
    """Return the gateway's own series."""
    rows = (
        ("dovetail_gateway_workers", "gauge", "Workers of this gateway.", workers),
        ("dovetail_gateway_workers_ready", "gauge", "Workers that take requests.", ready),
        ("dovetail_gateway_worker_starts_total", "counter", "Worker processes started here.", starts),
        ("dovetail_gateway_placed_total", "counter", "Requests whose worker was chosen by prefix.", placed),
    )
    return "".join(
        f"# HELP {name} {about}\n# TYPE {name} {kind}\n{name} {value}\n" for name, kind, about, value in rows
    )


COMMANDS = ("/flush_cache", "/abort_request", "/start_profile", "/stop_profile")
"""Whatever worker a request is on, or prefix is cached on."""
SUMMED = ("requests", "running_requests", "input_tokens", "output_tokens")
"""Numbers of a row of `/v1/usage`."""
ANSWER = aiohttp.ClientTimeout(total=60.0)
METRICS = aiohttp.ClientTimeout(total=5.0)
Endpoint = Callable[[Request], Awaitable[Response]]


class FanOut:
    """The routes that this process answers itself."""

    def __init__(self, state: GatewayState) -> None:
        """Answer for `state`."""
        self.state = state

    def routes(self) -> list[Route]:
        """Return them."""
        table: list[tuple[str, list[str], Endpoint]] = [
            ("/metrics", ["GET"], self.metrics),
            ("/loads", ["GET"], self.loads),
            ("/v1/loads", ["GET"], self.loads),
            ("/v1/workers", ["GET"], self.workers),
            ("/v1/usage", ["GET"], self.usage),
            *((path, ["GET", "POST"] if path == "/flush_cache" else ["POST"], self.command) for path in COMMANDS),
        ]
        own = [Route(path, endpoint, methods=methods) for path, methods, endpoint in table]
        return [*probe_routes(self.ready), *own]

    async def ready(self, request: Request) -> Response:
        """Whether requests would be served now: by one worker at least."""
        return answer(self.state.health())

    async def workers(self, request: Request) -> Response:
        """What is known of each worker."""
        caller = CALLER.get()
        rows = [
            {
                "number": worker.number,
                **({"url": shown(worker.url, caller)} if caller.may_admin else {}),
                "ready": worker.is_ready,
                "reason": (worker.refusal or worker.why_not or None) if caller.may_admin else None,
                "num_running": worker.num_running,
            }
            for worker in self.state.fleet.workers
        ]
        return _json({"object": "list", "data": rows})

    async def metrics(self, request: Request) -> Response:
        """Publish the series of all workers that answer."""
        replies = await self._ask_all(request, METRICS, self.state.fleet.workers)
        good = {str(worker.number): text.decode() for worker, (status, text, _) in replies.items() if status == 200}
        refused = [reply for reply in replies.values() if reply[0] in (401, 403)]
        if refused and not good:
            return Response(refused[0][1], refused[0][0], media_type=refused[0][2])
        fleet, starts = self.state.fleet, sum(child.num_starts for child in self.state.children)
        mine = own(len(fleet.ready()), len(fleet.workers), starts, self.state.placement.num_placed)
        return Response(mine + merged(good), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def loads(self, request: Request) -> Response:
        """Give each worker's load, by its number."""
        replies = await self._ask_all(request, METRICS, self.state.fleet.ready())
        rows: list[dict[str, Any]] = []
        for worker, (status, body, media) in replies.items():
            if status != 200:
                return Response(body, status, media_type=media)
            rows += [{**row, "dp_rank": worker.number} for row in msgspec.json.decode(body)["loads"]]
        now = {"timestamp": datetime.now(UTC).isoformat(), "version": dovetail.__version__}
        return _json({**now, "dp_rank_count": len(self.state.fleet.workers), "loads": rows})

    async def usage(self, request: Request) -> Response:
        """Add up what keys have used, over all workers that answer."""
        rows: dict[str, dict[str, Any]] = {}
        for status, body, media in (await self._ask_all(request, METRICS, self.state.fleet.ready())).values():
            if status != 200:
                return Response(body, status or 503, media_type=media)
            for row in msgspec.json.decode(body)["data"]:
                found = rows.setdefault(row["key"], {**row, **dict.fromkeys(SUMMED, 0), "rejected": {}})
                for name in SUMMED:
                    found[name] += row[name]
                for limit, num in row["rejected"].items():
                    found["rejected"][limit] = found["rejected"].get(limit, 0) + num
        return _json({"object": "list", "data": list(rows.values())})

    async def command(self, request: Request) -> Response:
        """Have every ready worker do something; the answer is that of the first which refuses, or of the first."""
        began = time.monotonic()
        replies = await self._ask_all(request, ANSWER, self.state.fleet.ready())
        if not replies:
            raise self.state.fleet.no_worker()
        chosen = next((reply for reply in replies.values() if not 200 <= reply[0] < 300), next(iter(replies.values())))
        if chosen[0] == 0:
            text = f"not every worker answered within {time.monotonic() - began:.0f} s: {chosen[1].decode()}"
            raise ServiceError(text, code="no_worker", retry_after_s=1)
        return Response(chosen[1], chosen[0], media_type=chosen[2])

    async def _ask_all(
        self, request: Request, timeout: aiohttp.ClientTimeout, workers: Any
    ) -> dict[Worker, tuple[int, bytes, str]]:
        """Send a request to several workers; status 0 and the reason where there is no answer."""
        body, query = await request.body(), request.scope["query_string"].decode("latin-1")
        names = ("authorization", "x-api-key", "api-key", "content-type")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        path = request.scope["path"] + (f"?{query}" if query else "")

        async def ask(worker: Worker) -> tuple[int, bytes, str]:
            try:
                async with self.state.session.request(
                    request.method, worker.url + path, data=body, headers=headers, timeout=timeout
                ) as reply:
                    return reply.status, await reply.read(), reply.headers.get("content-type", "text/plain")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                return 0, (str(error) or type(error).__name__).encode(), "text/plain"

        replies = await asyncio.gather(*(ask(worker) for worker in workers))
        return dict(zip(workers, replies, strict=True))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
