"""A stream that outlives its worker: events to the client, and another worker where one is gone."""

from __future__ import annotations

from contextlib import aclosing

import aiohttp

from dovetail_server.gateway.client_response import DownstreamResponse, reason
from dovetail_server.gateway.fleet import Worker
from dovetail_server.http.journal import JOURNAL_HEADER, PATH
from dovetail_server.relay.replies import CutError, Pieces, RelayedStream
from dovetail_server.serving.sse import COMMENT

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
