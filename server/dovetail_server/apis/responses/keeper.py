"""Who keeps a response when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail_server.apis.responses import objects as ro

if TYPE_CHECKING:
    from dovetail_server.apis.responses.store import ResponseStore


@dataclass(frozen=True, slots=True)
class ResponseRecorder:
    """Writes one owner's response."""

    store: ResponseStore
    owner: str

    async def finish(self, response: ro.ResponseObject, items: bytes) -> None:
        """Write it.

        Raises:
            ServiceError: The database cannot be used now.
        """
        await self.store.put(self.owner, response, items)
