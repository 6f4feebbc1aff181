"""Judging a finished text by its JSON Schema: the last word where enforcement was not full.

Done in a process of its own (`child`): a pattern in a schema can keep Python's matcher busy for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dovetail.grammar.compile.pool import START_S, ChildDiedError, ChildTimeoutError, WorkerPool
from dovetail.grammar.spec.wire import ChildCheck, ChildStart

TIMEOUT_S = 1.5
"""With the time of a compilation, an answer takes six seconds at most; a text is validated in milliseconds."""


class FinalValidator:
    """Judges texts in a child process, started at the first one at the latest. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None
        self._is_early = False

    def warm_up(self) -> None:
        """Begin to start the process ahead of the first text, which then waits for it no longer than for a verdict."""
        self._is_early = True
        self._started().warm_up()

    def validate(self, schema: str, texts: Sequence[str]) -> list[bool | None]:
        """Return for each text whether it conforms; None where that could not be found out in time. Blocks."""
        pool = self._started()
        job = ChildCheck(schema=schema, texts=list(texts), timeout_s=TIMEOUT_S)
        try:
            pool.wait_ready(TIMEOUT_S if self._is_early else START_S)
            reply = pool.run(job, TIMEOUT_S)
        except (ChildTimeoutError, ChildDiedError):
            return [None] * len(texts)
        return [None] * len(texts) if reply.error is not None else list(reply.validities)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _started(self) -> WorkerPool:
        with self._lock:
            if self._pool is None:
                self._pool = WorkerPool(ChildStart(), 1)
            return self._pool
