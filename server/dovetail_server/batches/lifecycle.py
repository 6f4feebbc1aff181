"""Advances batches: has them validated and finished, beside the lines that run, a few at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sqlalchemy.engine import RowMapping

from dovetail_server.batches.backoff import Backoff
from dovetail_server.batches.finalize import BatchFinalizer
from dovetail_server.batches.processes import LeaseLostError
from dovetail_server.batches.store import BatchStore, Lease
from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.schema.batches import BatchError
from dovetail_server.storage.disk import PASSING

if TYPE_CHECKING:
    from dovetail_server.batches.runner import Runner
    from dovetail_server.reading.context import ReadingContext

logger = logging.getLogger("dovetail.server")
MAX_AT_ONCE = 4
MAX_READS = 10
"""An input that cannot be read is tried so often, unless the reason is one that passes."""


class BatchLifecycle:
    """One per process, looked at by its runner."""

    def __init__(self, state: ReadingContext, store: BatchStore, finalizer: BatchFinalizer, runner: Runner) -> None:
        """Begin with nothing under way."""
        self.state = state
        self.store = store
        self.finalizer = finalizer
        self.runner = runner
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, Backoff] = {}
        self._num_unreadable: dict[str, int] = {}

    @property
    def problem(self) -> str | None:
        """Why a batch cannot advance now, or None."""
        return next((f"{batch_id}: {pause.reason}" for batch_id, pause in self._pauses.items()), None)

    async def advance(self, rows: Sequence[RowMapping]) -> None:
        """Begin what is due."""
        known = {str(row["id"]) for row in rows}
        self._pauses = {key: pause for key, pause in self._pauses.items() if key in known}
        for row in rows:
            batch_id = str(row["id"])
            if row["status"] == "in_progress":
                if (row["is_over"] or not row["has_open"]) and await self.store.finalize(batch_id):
                    self.runner.wake()
                continue
            if row["status"] == "validating" and not self.state.has_started:
                continue
            is_paused = batch_id in self._pauses and self._pauses[batch_id].is_on
            if batch_id not in self._tasks and len(self._tasks) < MAX_AT_ONCE and not is_paused:
                self._tasks[batch_id] = self.state.tasks.start("batch lifecycle", self._run(row))

    async def _run(self, row: RowMapping) -> None:
        """Validate or finish a batch, if nobody else does; a fault is noted, and it is tried again later."""
        batch_id = str(row["id"])
        try:
            await self._advance(row)
            self._pauses.pop(batch_id, None)
            self._num_unreadable.pop(batch_id, None)
        except LeaseLostError:
            pass  # it was cancelled, or it is somebody else's now
        except (OSError, ServiceError) as error:
            self._pause(batch_id, str(error))
        except Exception as error:
            self._pause(batch_id, f"unexpected error: {type(error).__name__}: {error}")
            raise
        finally:
            self._tasks.pop(batch_id, None)
            self.runner.wake()

    def _pause(self, batch_id: str, reason: str) -> None:
        pause = self._pauses.setdefault(batch_id, Backoff())
        if pause.reason is None:
            logger.warning("Batch %s pauses: %s", batch_id, reason)
        pause.begin(reason)

    async def _advance(self, row: RowMapping) -> None:
        lease = await self.store.lease(str(row["id"]))
        if lease is None:
            return
        try:
            if row["status"] == "validating":
                await self._validate(row, lease)
            else:
                await self.runner.stop_lines(lease.batch_id)
                status = await self.finalizer.finish(row, lease)
                self.runner.writer.forget(lease.batch_id)
                logger.info("Batch %s: %s.", lease.batch_id, status)
        finally:
            await self._unlease(lease)

    async def _unlease(self, lease: Lease) -> None:
        try:
            await self.store.release_lease(lease)
        except Exception as error:  # it is this process's, which may take it again
            logger.warning("Batch %s: its lease could not be given back: %s", lease.batch_id, error)

    async def _validate(self, row: RowMapping, lease: Lease) -> None:
        try:
            await self.finalizer.validate(row, lease)
        except OSError as error:
            num = self._num_unreadable.get(lease.batch_id, 0) + (error.errno not in PASSING)
            self._num_unreadable[lease.batch_id] = num
            if num < MAX_READS:
                raise
            text = f"the input file cannot be read: {error.strerror}"
            await self.finalizer.fail(lease, [BatchError(code="file_unreadable", message=text, param="input_file_id")])

    async def close(self) -> None:
        """Stop; what is under way is given back."""
        await self.state.tasks.stop(list(self._tasks.values()))
