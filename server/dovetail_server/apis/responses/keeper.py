"""Who keeps a response when it has ended."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail_server import errors

if TYPE_CHECKING:
    from dovetail_server.apis.responses.store import ResponseStore

logger = logging.getLogger("dovetail.server")


@dataclass(frozen=True, slots=True)
class ResponseRecorder:
    """Writes one owner's response. `items` are the request's own input, JSON."""

    store: ResponseStore
    owner: str
    response_id: str
    items: bytes

    async def begin(self, body: bytes) -> None:
        """Write a response that will be generated.

        Raises:
            ServiceError: The database cannot be used now.
        """
        await self.store.put(self.owner, body, self.items)

    async def finish(self, body: bytes, model: str) -> bool:
        """Write it; where that is not possible, it is given out all the same, and the log says so."""
        try:
            await self.store.put(self.owner, body, self.items)
        except errors.ServiceError as error:
            logger.warning("Response %s could not be stored: %s", self.response_id, error)
            return False
        return True
