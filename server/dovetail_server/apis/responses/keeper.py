"""Who keeps a response when it has ended."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from dovetail_server.apis.responses.items import turn_items
from dovetail_server.apis.responses.last import LastResponse, Turns
from dovetail_server.errors import catalogue as errors

if TYPE_CHECKING:
    from dovetail_server.apis.responses.conversations import ConversationStore
    from dovetail_server.apis.responses.store import ResponseStore

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
