"""Forwards a request to a worker and its reply to the client, byte by byte, with bounds on both sides.

A request for a text is read whole, as every server does (`BodyLimitMiddleware` bounds it), so that it can be given to
another worker when the one that was chosen cannot be reached, or says that it is stopping. Uploads and files go through
piece by piece; how much of other replies is held is in `client_response` and `relay`. A client that takes nothing for
`--stream-write-timeout` is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

import aiohttp
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from yarl import URL

from dovetail_server.errors.catalogue import ClientGoneError, ServiceError, no_websocket, refuse_websocket
from dovetail_server.gateway.client_response import HOP, DownstreamResponse, UnreachableError, reason
from dovetail_server.gateway.fleet import Worker
from dovetail_server.http.addresses import ASKED
from dovetail_server.http.journal import JOURNAL_HEADER, KEY_HEADER, PATH, end_of
from dovetail_server.relay.replies import STILL, CutError, Pieces, RelayedStream
from dovetail_server.serving.sse import COMMENT

if TYPE_CHECKING:
    from dovetail_server.gateway.state import GatewayState

# A stream that outlives its worker: events to the client, and another worker where one is gone.

WAIT_S = 120.0
"""So long a stream waits for a worker when none is ready."""
SLICE_S = 5.0
"""A client that waits hears something so often."""


class WorkerStream(RelayedStream):
    """One stream, on its way from one worker after the other to its client."""

    def __init__(self, downstream: DownstreamResponse, headers: list[tuple[str, str]], body: bytes) -> None:
        """Begin; `headers` are those of the request as they are sent to workers, with the resume key."""
        path, self.state = downstream.scope["path"], downstream.state
        super().__init__(self.state, self.state.places, path, body, downstream.scope["state"]["request_id"])
        self._downstream = downstream
        self._headers = headers
        route = self.state.places.route(path)
        self._comment = COMMENT if route is None else route.writer.keep_alive
        self._worker: Worker

    async def run(self, worker: Worker, reply: aiohttp.ClientResponse) -> None:
        """Send a reply's events, and those that another worker makes where this one breaks off."""
        self._worker = worker
        await self._downstream.head(reply)
        await self.pass_on(self._pieces(reply), reply.headers.get(JOURNAL_HEADER), reply.content_type)
        await self._downstream.body(b"", more=False)

    async def send(self, data: bytes) -> None:
        """Send a piece; a client that does not take it is cut off."""
        await self._downstream.body(data)

    def lost(self, why: str) -> str:
        """Have the worker looked at."""
        self._worker.is_lost(why)
        return f"worker {self._worker.tag}"

    async def another(self) -> Pieces | str:
        """Wait for a worker, and let the client know that somebody does."""
        found, waited = self.state.fleet.least_busy({self._worker}), 0.0
        while found is None and waited < WAIT_S:
            found = await self.state.fleet.wait_ready(SLICE_S)
            waited += SLICE_S
            if found is None and self._comment:
                await self._downstream.body(self._comment)
        if found is None:
            return self.state.fleet.no_worker().message
        self._worker, self.successor = found, found.tag
        return self._resumed()

    async def _resumed(self) -> Pieces:
        """Have the worker go on.

        Raises:
            CutError: It does not, or not to the end.
        """
        worker, body = self._worker, self.kept.resume_body()
        worker.num_running += 1
        try:
            async with self.state.session.post(worker.url + PATH, data=body, headers=self._headers) as reply:
                if reply.status != 200:
                    self.kept.name = self.kept.name if reply.status == 503 else None
                    said = (await reply.content.read(500)).decode("utf-8", "replace")
                    raise CutError(f"worker {worker.tag} does not go on: {reply.status} {said}")
                async with aclosing(self._pieces(reply)) as pieces:
                    async for piece in pieces:
                        yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise CutError(reason(error)) from None
        finally:
            worker.num_running -= 1

    async def _pieces(self, reply: aiohttp.ClientResponse) -> Pieces:
        """Yield what the worker sends, until it is stuck.

        Raises:
            CutError: It broke off before its end.
        """
        worker = self._worker
        worker.when_stuck.add(reply.close)
        try:
            async for piece in reply.content.iter_any():
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise CutError(reason(error)) from None
        finally:
            worker.when_stuck.discard(reply.close)


logger = logging.getLogger("dovetail.server")
ELSEWHERE = frozenset({"draining", "starting", "engine_dead", "no_worker"})
"""Codes of a 503 after which another worker may do better."""
BACKGROUND = b'"background"'
"""A response that goes on by itself is asked about later, where all such questions go."""
READING = frozenset({"GET", "HEAD"})
"""Methods that change nothing: such a request is given to another worker when one could not answer it."""
WAIT_S = 20.0
"""So long a request waits for a worker when none is ready: one that is started again takes some seconds."""
PIECE = 1 << 16


class Relay:
    """ASGI application: every route that is not one of this process's own."""

    def __init__(self, state: GatewayState) -> None:
        """Relay for `state`."""
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await refuse_websocket(no_websocket(scope["path"]), scope, receive, send)
            return
        request = Request(scope, receive)
        is_whole = request.method == "POST" and self.state.places.is_held(scope["path"])
        try:
            if not is_whole:
                await self._through(request, send)
                return
            body = await request.body()
            if scope["path"] == "/v1/responses" and BACKGROUND in body:
                await self._through(request, send, body)
                return
        except ClientDisconnect:
            raise ClientGoneError("the client left before the end of its request") from None
        text = self.state.places.prompt(scope["path"], body)
        downstream = DownstreamResponse(self.state, request, send, is_asked_again=True)
        async with self._placed(text) as chosen:
            await self._deliver(request, downstream, body, chosen)

    @asynccontextmanager
    async def _placed(self, text: str | None) -> AsyncIterator[Worker | None]:
        if text is None:
            yield None
            return
        async with self.state.placement.choose(text) as chosen:
            yield chosen

    async def _deliver(
        self, request: Request, downstream: DownstreamResponse, body: bytes, chosen: Worker | None
    ) -> None:
        """Give a request to one worker after the other, until one answers it.

        Raises:
            ServiceError: None does.
        """
        fleet, tried, num_taken = self.state.fleet, set[Worker](), 0
        while num_taken <= STILL:
            worker = chosen if chosen is not None and chosen.is_ready and chosen not in tried else None
            worker = worker or fleet.least_busy(tried)
            if worker is None:
                tried.clear()  # what could not be reached may have been started again
                worker = await fleet.wait_ready(WAIT_S)
            if worker is None:
                raise fleet.no_worker()
            tried.add(worker)
            try:
                await self._exchange(request, downstream, worker, body)
                return
            except UnreachableError as error:
                worker.is_lost(str(error))
                num_taken += error.was_taken
                logger.warning("Worker %s did not answer a request (%s); another one gets it.", worker.tag, error)
        text = f"{num_taken} workers ended while they had this request, and no other one gets it"
        raise ServiceError(text, code="request_lost")

    async def _through(self, request: Request, send: Send, held: bytes | None = None) -> None:
        """Give a request that is not held to a worker: what is asked twice is asked of the same one, while it lives.

        Another one is asked where that one did not get the request, or what only reads was not answered.

        Raises:
            ServiceError: No worker answers.
            ClientGoneError: The client was cut off.
        """
        fleet, reads = self.state.fleet, request.method in READING
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        body = held if held is not None else request.stream() if has_body else None
        num_left = STILL if body is None or isinstance(body, bytes) else 0
        downstream = DownstreamResponse(self.state, request, send, is_asked_again=num_left > 0 and reads)
        while True:
            worker = fleet.ready()[0] if fleet.ready() else await fleet.wait_ready(WAIT_S)
            if worker is None:
                raise downstream.lost(fleet.no_worker())
            try:
                await self._exchange(request, downstream, worker, body)
                return
            except UnreachableError as error:
                worker.is_lost(str(error))
                if not num_left or (error.was_taken and not reads):
                    text = f"worker {worker.tag} cannot be reached ({error}); try again"
                    raise downstream.lost(ServiceError(text, code="no_worker", retry_after_s=1)) from None
                what = "did not send all of a file" if downstream.has_begun else "did not answer a request"
                logger.warning("Worker %s %s (%s); another one gets it.", worker.tag, what, error)
                num_left -= 1

    async def _exchange(
        self,
        request: Request,
        downstream: DownstreamResponse,
        worker: Worker,
        body: bytes | AsyncIterator[bytes] | None,
    ) -> None:
        """Send a request to a worker and its reply to the client.

        Raises:
            UnreachableError: Nothing of a reply came, or one that another worker may do better.
            ClientGoneError: The client was cut off.
        """
        worker.num_running += 1
        try:
            work = self.state.tasks.start("relay", self._relay(request, downstream, worker, body), is_awaited=True)
            # A body that goes through is read by the work itself, which then notices by itself that the client left.
            watched = body is None or isinstance(body, bytes)
            gone = self.state.tasks.start("client watch", _gone(request.receive, watched), is_awaited=True)
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            except ServiceError as error:
                raise downstream.lost(error) from None
            finally:
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
        finally:
            worker.num_running -= 1

    async def _relay(
        self,
        request: Request,
        downstream: DownstreamResponse,
        worker: Worker,
        body: bytes | AsyncIterator[bytes] | None,
    ) -> None:
        query = request.scope["query_string"].decode("latin-1")
        path = request.scope.get(ASKED) or request.scope["path"]
        url = URL(worker.url + quote(path) + (f"?{query}" if query else ""), encoded=True)
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP | {"origin"}]
        headers.append(("x-request-id", request.scope["state"]["request_id"]))
        resumes = self.state.places.resumes(request.scope["path"])
        if self.state.resume_key is not None and resumes and isinstance(body, bytes):
            headers.append((KEY_HEADER, self.state.resume_key))
        if downstream.num_sent and downstream.etag is not None:
            headers += [("range", f"bytes={downstream.num_sent}-"), ("if-range", downstream.etag)]
        try:
            reply = await self.state.session.request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            )
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(reason(error), was_taken=True) from None
        async with reply:
            is_held = body is None or isinstance(body, bytes)
            if reply.status == 503 and is_held and await _is_elsewhere(reply):
                raise UnreachableError("it says that it is stopping or starting")
            is_stream = JOURNAL_HEADER in reply.headers and end_of(reply.content_type) is not None
            if is_stream and isinstance(body, bytes):
                await WorkerStream(downstream, headers, body).run(worker, reply)
            elif downstream.has_begun and reply.status != (206 if downstream.num_sent else 200):
                raise ServiceError(f"worker {worker.tag} has another file there ({reply.status})", code="reply_lost")
            else:
                await downstream.send_all(reply)


async def _gone(receive: Receive, is_watched: bool) -> None:
    """Return when the client has left; never, where somebody else reads what it sends."""
    if not is_watched:
        await asyncio.Event().wait()
    while (await receive())["type"] != "http.disconnect":
        pass


async def _is_elsewhere(reply: aiohttp.ClientResponse) -> bool:
    """Whether a 503 is about the worker rather than about the request; reads it."""
    try:
        body = await reply.json(content_type=None)
        detail = body.get("error", {}) if isinstance(body, dict) else {}
    except (ValueError, aiohttp.ClientError):
        return False
    return isinstance(detail, dict) and detail.get("code") in ELSEWHERE
