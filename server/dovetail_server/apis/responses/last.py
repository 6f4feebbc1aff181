"""What a WebSocket remembers of its last response where no store has it: what the next one continues.

With `store: false` clients send only what is new, and `previous_response_id`. A connection remembers one response with
all that it continues; all connections together remember so many bytes, and the owner of the most forgets first.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar

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
