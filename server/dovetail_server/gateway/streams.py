"""A stream that outlives its worker: events to the client, its journal kept here, another worker when one is gone.

What is kept of it, and for how long, is in `kept`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import aiohttp
from starlette.requests import Request

from dovetail_server.gateway.client_response import reason
from dovetail_server.gateway.fleet import Worker
from dovetail_server.gateway.resume_buffer import StreamBuffer
from dovetail_server.http.journal import END, JOURNAL_HEADER, PATH, end_of
from dovetail_server.serving.sse import COMMENT

if TYPE_CHECKING:
    from dovetail_server.gateway.client_response import DownstreamResponse
    from dovetail_server.gateway.state import GatewayState

logger = logging.getLogger("dovetail.server")
STILL = 2
"""Workers that a stream may lose without a new token between: what ends every worker is the request itself."""
WAIT_S = 120.0
"""So long a stream waits for a worker when none is ready."""
SLICE_S = 5.0
"""A client that waits hears something so often."""


class CutError(Exception):
    """The worker's reply has broken off."""


class Stream:
    """One stream, on its way from one worker after the other to its client."""

    def __init__(
        self,
        state: GatewayState,
        outlet: DownstreamResponse,
        request: Request,
        headers: list[tuple[str, str]],
        body: bytes,
    ) -> None:
        """Begin; `headers` are those of the request as they are sent to workers, with the resume key."""
        self.state = state
        self.outlet = outlet
        path, request_id = request.scope["path"], request.scope["state"]["request_id"]
        self.kept = StreamBuffer(state, path, body, state.places.ending(path, request_id))
        self._headers = headers
        route = state.places.route(path)
        self._comment = COMMENT if route is None else route.writer.keep_alive

    async def run(self, worker: Worker, reply: aiohttp.ClientResponse) -> None:
        """Send a reply's events, and those that another worker makes where this one breaks off."""
        self.kept.name = reply.headers.get(JOURNAL_HEADER)
        self.kept.end = end_of(reply.content_type) or END
        try:
            await self.outlet.head(reply)
            try:
                await self._pass_on(worker, reply)
            except CutError as error:
                await self._move(worker, str(error))
            await self.outlet.body(b"", more=False)
        finally:
            self.kept.forget()

    async def _move(self, worker: Worker, why: str) -> None:
        """Have other workers go on, until one comes to the end."""
        while True:
            worker.is_lost(why)
            self.kept.num_still += 1
            if self.kept.name is None or self.kept.num_still > STILL:
                cause = "it cannot be moved" if self.kept.name is None else f"{self.kept.num_still} workers ended on it"
                logger.error("A stream of worker %s broke off (%s), and %s.", worker.tag, why, cause)
                await self._give_up(f"the stream broke off: {why}")
                return
            found = await self._next_worker(worker)
            if found is None:
                await self._give_up(self.state.fleet.nobody().message)
                return
            logger.warning("A stream of worker %s goes on with %s: %s.", worker.tag, found.tag, why)
            worker = found
            try:
                worker.num_running += 1
                await self._go_on(worker)
                return
            except CutError as error:
                why = str(error)
            finally:
                worker.num_running -= 1

    async def _next_worker(self, lost: Worker) -> Worker | None:
        """Wait for a worker, and let the client know that somebody does."""
        if (other := self.state.fleet.least_busy({lost})) is not None:
            return other
        waited = 0.0
        while waited < WAIT_S:
            if (found := await self.state.fleet.wait_ready(SLICE_S)) is not None:
                return found
            waited += SLICE_S
            if self._comment:
                await self.outlet.body(self._comment)
        return None

    async def _go_on(self, worker: Worker) -> None:
        """Have a worker go on, and send what it makes.

        Raises:
            CutError: It does not, or not to the end.
        """
        body = self.kept.resume_body()
        try:
            async with self.state.session.post(worker.url + PATH, data=body, headers=self._headers) as reply:
                if reply.status == 503:
                    raise CutError(f"worker {worker.tag} says {await said(reply)}")
                if reply.status != 200:
                    self.kept.name = None
                    raise CutError(f"worker {worker.tag} does not go on: {await said(reply)}")
                await self._pass_on(worker, reply)
        except (aiohttp.ClientError, OSError) as error:
            raise CutError(reason(error)) from None

    async def _pass_on(self, worker: Worker, reply: aiohttp.ClientResponse) -> None:
        """Send the events of a reply to its end.

        Raises:
            CutError: It broke off before.
        """
        worker.when_stuck.add(reply.close)
        try:
            await self._pass_pieces(reply)
        finally:
            worker.when_stuck.discard(reply.close)

    async def _pass_pieces(self, reply: aiohttp.ClientResponse) -> None:
        pieces = reply.content.iter_any()
        while True:
            try:
                piece = await anext(pieces, None)
            except (aiohttp.ClientError, OSError) as error:
                raise CutError(reason(error)) from None
            if piece is None:
                if self.kept.rest:
                    await self.outlet.body(bytes(self.kept.rest))
                return
            if events := self.kept.take(piece):
                await self.outlet.body(events)

    async def _give_up(self, why: str) -> None:
        """Tell the client in the stream's own way."""
        await self.outlet.body(self.kept.final_events(why))


async def said(reply: aiohttp.ClientResponse) -> str:
    """Return the beginning of an error reply."""
    return f"{reply.status} {(await reply.content.read(500)).decode('utf-8', 'replace')}"
