"""Who keeps a response when it has ended."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from dovetail_server.apis.responses.items import turn_items
from dovetail_server.errors import catalogue as errors

if TYPE_CHECKING:
    from dovetail_server.apis.responses.conversations import ConversationStore
    from dovetail_server.apis.responses.store import ResponseStore

# What a WebSocket remembers of its last response where no store has it: what the next one continues.
#
# With `store: false` clients send only what is new, and `previous_response_id`. A connection remembers one response
# with all that it continues; all connections together remember so many bytes, and the owner of the most forgets first.

Turns = list[tuple[bytes, bytes]]
"""Input items and reply of each response, as JSON: see `references.Answer`."""


class Memory:
    """What all connections of a server remember together."""

    def __init__(self, most_bytes: int) -> None:
        """Remember nothing yet."""
        self.most_bytes = most_bytes
        self._connections: dict[LastResponse, int] = {}
        """Their bytes, the oldest first."""
        self._of: Counter[str] = Counter()

    def put(self, connection: LastResponse, num_bytes: int) -> None:
        """Count what a connection remembers now, and have others forget where that is too much."""
        self._of[connection.owner] += num_bytes - self._connections.pop(connection, 0)
        if num_bytes:
            self._connections[connection] = num_bytes
        if not self._of[connection.owner]:
            del self._of[connection.owner]
        while self._of.total() > self.most_bytes:
            owner, _ = self._of.most_common(1)[0]
            next(one for one in self._connections if one.owner == owner).forget()


class LastResponse:
    """The last response of one connection."""

    def __init__(self, memory: Memory, owner: str) -> None:
        """Remember nothing yet; `owner` is whose connection it is."""
        self.owner = owner
        self._memory = memory
        self._response_id = ""
        self._turns: Turns = []

    def find(self, response_id: str | None) -> Turns | None:
        """Return what a response that continues this one begins with; None where another one is meant."""
        return self._turns if response_id is not None and response_id == self._response_id else None

    def remember(self, response_id: str, turns: Turns) -> None:
        """Put a response in the place of the one before."""
        self._response_id, self._turns = response_id, turns
        self._memory.put(self, sum(len(own) + len(body) for own, body in turns))

    def forget(self) -> None:
        """Remember nothing: there is no room, or the connection has ended."""
        self.remember("", [])


LAST: ContextVar[LastResponse | None] = ContextVar("dovetail_last_response", default=None)
"""Of the connection that the present request came on; None over HTTP."""


logger = logging.getLogger("dovetail.server")


class Status(msgspec.Struct):
    """How a response ended."""

    status: str


decode_status = msgspec.json.Decoder(Status).decode


@dataclass(frozen=True, slots=True)
class ResponseRecorder:
    """Keeps one owner's response, and adds it to the conversation that it goes on with.

    Attributes:
        store: Where responses are kept; None where this one is not.
        owner: Whose it is.
        response_id: Its identifier.
        items: The request's own input, JSON.
        conversation: The identifier of the conversation, if there is one, and …
        conversations: … where it is kept.
        last: What remembers it where `store` does not, if its client may continue it so, …
        turns: … and what it continues.
    """

    store: ResponseStore | None
    owner: str
    response_id: str
    items: bytes
    conversation: str = ""
    conversations: ConversationStore | None = None
    last: LastResponse | None = None
    turns: Turns = field(default_factory=list)

    async def begin(self, body: bytes) -> None:
        """Write a response that will be generated.

        Raises:
            ServiceError: The database cannot be used now.
        """
        if self.store is None:
            raise RuntimeError("a background response needs a store")
        await self.store.put(self.owner, body, self.items)

    async def finish(self, body: bytes, model: str) -> bool:
        """Write it; where that is not possible, it is given out all the same, and the log says so.

        Raises:
            RequestError: Its conversation is gone, so that the reply is in none.
            ServiceError: It cannot be added to its conversation now.
        """
        has_output = decode_status(body).status in ("completed", "incomplete")
        if self.last is not None and has_output:
            self.last.remember(self.response_id, [*self.turns, (self.items, body)])
        if self.conversations is not None and has_output:
            turn = await asyncio.to_thread(turn_items, self.items, body)
            await self.conversations.add_turn(self.owner, self.conversation, turn)
        if self.store is None:
            return False
        try:
            await self.store.put(self.owner, body, self.items)
        except errors.ServiceError as error:
            logger.warning("Response %s could not be stored: %s", self.response_id, error)
            return False
        return True
