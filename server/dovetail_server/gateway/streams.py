"""A stream that outlives its worker: events to the client, its journal kept here, another worker when one is gone.

What a worker writes besides events is in `dovetail_server.journal`. Only whole events are passed on, so that it is
known which ones the client has. A stream keeps its request, its journal and the event that is coming:
`MAX_JOURNAL_BYTES`, and all streams together `--max-queued-bytes`; one that would be over that goes on without, and
ends with its worker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from dovetail_server.gateway.fleet import Worker
from dovetail_server.gateway.outlet import reason
from dovetail_server.journal import END, JOURNAL_HEADER, MAX_JOURNAL_BYTES, PATH, PREFIX
from dovetail_server.serving.sse import COMMENT, error_event, final_error_event

if TYPE_CHECKING:
    from dovetail_server.gateway.outlet import Outlet
    from dovetail_server.gateway.state import GatewayState

logger = logging.getLogger("dovetail.server")
MAX_EVENT_BYTES = 64 << 20
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
        self, state: GatewayState, outlet: Outlet, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> None:
        """Begin; `headers` are those of the request as they are sent to workers, with the resume key."""
        self.state = state
        self.outlet = outlet
        self.path = path
        self._headers = headers
        self._body = body
        self._name: str | None = None
        """Of the journal; None where there is none, or no more."""
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._num_events = 0
        self._rest = bytearray()
        self._num_still = 0

    async def run(self, worker: Worker, reply: aiohttp.ClientResponse) -> None:
        """Send a reply's events, and those that another worker makes where this one breaks off."""
        self._name = reply.headers.get(JOURNAL_HEADER)
        try:
            await self.outlet.head(reply)
            try:
                await self._pass_on(worker, reply)
            except CutError as error:
                await self._move(worker, str(error))
            await self.outlet.body(b"", more=False)
        finally:
            self._forget()

    async def _move(self, worker: Worker, why: str) -> None:
        """Have other workers go on, until one comes to the end."""
        while True:
            worker.is_lost(why)
            self._num_still += 1
            if self._name is None or self._num_still > STILL:
                cause = "it cannot be moved" if self._name is None else f"{self._num_still} workers ended on it"
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
            await self.outlet.body(COMMENT)
        return None

    async def _go_on(self, worker: Worker) -> None:
        """Have a worker go on, and send what it makes.

        Raises:
            CutError: It does not, or not to the end.
        """
        self._rest.clear()  # the beginning of an event: it is made again, whole
        head = {"path": self.path, "journal": self._name, "skip": self._num_events}
        deltas = b'"deltas":[' + b",".join(self._lines) + b"]}\n"
        body = msgspec.json.encode(head)[:-1] + b"," + deltas + self._body
        try:
            async with self.state.session.post(worker.url + PATH, data=body, headers=self._headers) as reply:
                if reply.status == 503:
                    raise CutError(f"worker {worker.tag} says {await said(reply)}")
                if reply.status != 200:
                    self._name = None
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
                if self._rest:
                    await self.outlet.body(bytes(self._rest))
                return
            if events := self._take(piece):
                await self.outlet.body(events)

    def _take(self, piece: bytes) -> bytes:
        """Add a piece; returns the events that are whole now, without the journal's lines."""
        rest = self._rest
        searched = max(0, len(rest) - 1)
        rest += piece
        at = rest.rfind(END, searched)
        if at < 0:
            if len(rest) > MAX_EVENT_BYTES:
                self._stop_journal("one event is too large")
                events = bytes(rest)
                rest.clear()
                return events
            return b""
        whole = bytes(rest[:at])
        del rest[: at + len(END)]
        passed = []
        for event in whole.split(END):
            if event.startswith(PREFIX):
                self._note(event[len(PREFIX) :])
                continue
            self._num_events += not event.startswith(b":")
            passed.append(event)
        return END.join((*passed, b"")) if passed else b""

    def _note(self, line: bytes) -> None:
        if self._name is None:
            return
        self._num_still = 0
        self._lines.append(line)
        self._num_bytes += len(line)
        self.state.num_journal_bytes += len(line)
        if self._num_bytes > MAX_JOURNAL_BYTES:
            self._stop_journal(f"its journal is over {MAX_JOURNAL_BYTES} bytes")
        elif self.state.num_journal_bytes > self.state.settings.max_queued_bytes:
            self._stop_journal("the journals of all streams are over --max-queued-bytes")

    def _stop_journal(self, why: str) -> None:
        logger.warning("A stream would end with its worker from now on: %s.", why)
        self._name = None
        self._forget()

    def _forget(self) -> None:
        self.state.num_journal_bytes -= self._num_bytes
        self._num_bytes = 0
        self._lines = []

    async def _give_up(self, why: str) -> None:
        """Tell the client in the stream's own way."""
        from dovetail_server.errors import ServiceError

        error = ServiceError(f"{why}; try again", code="stream_lost", retry_after_s=1)
        ends = final_error_event if self.path in CHAT_LIKE else error_event
        await self.outlet.body(END + ends(error) if self._rest else ends(error))


CHAT_LIKE = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})
"""Whose streams end with `data: [DONE]`."""


async def said(reply: aiohttp.ClientResponse) -> str:
    """Return the beginning of an error reply."""
    return f"{reply.status} {(await reply.content.read(500)).decode('utf-8', 'replace')}"
