"""The client of an engine in a process of its own, which it starts again when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from dovetail.base.settings import EngineSettings
from dovetail.engine.streams import ABORTED, CLOSED, EngineTokenStream, RequestEntry, StreamClient
from dovetail.messages import (
    POISON,
    Abort,
    Control,
    EngineFailed,
    EngineInfo,
    Finish,
    FromEngine,
    ProfileSpec,
    Ready,
    StepDeltas,
    Submit,
    ToEngine,
)
from dovetail.plugins import PluginPlan
from dovetail_server.supervision.poison_isolation import ALARM_S, RestartLimit, has_got_on, note_crash, to_try
from dovetail_server.supervision.process_handle import EngineProcess
from dovetail_server.supervision.stall_logger import EngineWatchdog
from dovetail_server.supervision.supervisor import Supervisor
from dovetail_server.supervision.wire import Start

logger = logging.getLogger("dovetail.engine")

CONNECT_S = 60.0
"""For the new process to connect, which it does before it imports anything large."""
START_STALL_S = 120.0
"""Starting may take as long as it does, but for so long nothing must be heard of it."""
STOP_TIMEOUT_S = 5.0
GROWN = 1024
"""After this many steps an engine has larger chunks again: a hang after them is the first in a row."""
PROFILE_S = 600.0
"""While a profile runs, hangs are not detected, for at most this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """When an engine counts as hanging, and how often it is started again.

    `max_restarts` within `window_s` seconds, 0 for never; within `hang_s` a busy engine must get on, by a step or a
    layer.
    """

    max_restarts: int = 16
    window_s: float = 600.0
    hang_s: float = 30.0


class ProcessClient(StreamClient):
    """Keeps an engine process running. What was submitted goes on in the next one, behind what has come of it."""

    def __init__(
        self, settings: EngineSettings, plan: PluginPlan, *, log_level: str = "info", restarts: Restarts | None = None
    ) -> None:
        """Prepare; `start` starts the first engine."""
        super().__init__(seed=settings.random_seed)
        self.command: tuple[str, ...] = ("-m", "dovetail_server.supervision.engine_main")
        """Arguments of the interpreter, before the path of the socket."""
        names = EngineSettings.model_fields
        plain = EngineSettings.model_validate({name: getattr(settings, name) for name in names})
        self._restarts = restarts or Restarts()
        self._start_message = Start(
            settings=plain.model_dump(mode="json"), plan=plan, log_level=log_level, hang_s=self._restarts.hang_s
        )
        self._limit = RestartLimit(self._restarts.max_restarts, self._restarts.window_s)
        self._tasks = Supervisor()
        self._handle: EngineProcess | None = None
        self._watchdog = EngineWatchdog(CONNECT_S)
        self._was_ready = False
        self._num_heard = 0
        self._num_hangs = 0
        self._num_restarts = 0
        self._restarting: str | None = None
        self._died_at = 0.0
        self._tried: RequestEntry | None = None
        self._alarmed_until = 0.0
        self._closing = False
        self._profiled_until = 0.0

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._handle is None else self._handle.pid

    @property
    def restarting(self) -> str | None:
        """See `EngineClient.restarting`."""
        return self._restarting

    @property
    def num_restarts(self) -> int:
        """See `EngineClient.num_restarts`."""
        return self._num_restarts

    async def start(self) -> EngineInfo:
        """See `EngineClient.start`."""
        self.started = asyncio.get_running_loop().create_future()
        self._tasks.start("engine", self._keep_alive())
        self._tasks.keep("engine heartbeat", self._watch)
        try:
            return await asyncio.shield(self.started)
        except BaseException:
            await self.close()
            raise

    async def close(self, *, wait: bool = True) -> None:
        """See `EngineClient.close`."""
        self._closing = True
        handle = self._handle
        if handle is not None:
            if handle.is_ready:
                handle.send(Control(id=0, op="shutdown"))
            if not handle.is_ready or not await handle.wait(STOP_TIMEOUT_S if wait else 0):
                handle.kill(CLOSED)
        await self._tasks.close()
        self.engine_died(CLOSED)

    async def control(self, op: str, profile: ProfileSpec | None = None, *, after: int = 0) -> dict[str, Any]:
        """See `EngineClient.control`. While a profile is recorded and written, nothing counts as a hang."""
        if op == "start_profile":
            self._profiled_until = time.monotonic() + PROFILE_S
        found = await super().control(op, profile, after=after)
        if op == "stop_profile":
            self._profiled_until = 0.0
        return found

    def submit(self, request: Submit, *, every: int = 1) -> EngineTokenStream:
        """See `EngineClient.submit`."""
        if self._closing:
            self.engine_died(CLOSED)
        return super().submit(request, every=every)

    def close_stream(self, entry: RequestEntry, *, finished: bool) -> None:
        """See `StreamClient.close_stream`."""
        super().close_stream(entry, finished=finished)
        if entry is self._tried:
            self._try_next()

    # ---- one engine after another

    async def _keep_alive(self) -> None:
        """Start engines until no further one is allowed; every request ends, whatever happens here."""
        try:
            while True:
                self.step = 0
                start = msgspec.structs.replace(self._start_message, num_hangs=self._num_hangs)
                self._handle = handle = EngineProcess(self.command, start, self._take)
                self._watchdog = EngineWatchdog(CONNECT_S)
                why = await handle.run()
                self._num_hangs = (0 if self.step >= GROWN else self._num_hangs) + handle.has_hung
                if not self._was_ready or self._closing or (refusal := self._may_not_restart(handle, why)):
                    break
                await asyncio.sleep(self._limit.delay_s)
            if self._closing:
                self.engine_died(CLOSED)
            elif not self._was_ready:
                self.engine_died(why, user_error=handle.failure is not None and handle.failure.user_error)
            else:
                self.engine_died(f"{why}; it is not started again, for {refusal}")
        except Exception as error:
            self.engine_died(f"the engine cannot be started: {type(error).__name__}: {error}")
            raise

    def _may_not_restart(self, handle: EngineProcess, why: str) -> str | None:
        """Account for a death; returns why there is no further start, if there is none."""
        num_explained = self._note_crash(handle, why)
        refusal = self._limit.died(was_ready=handle.is_ready, num_explained=num_explained)
        if refusal is not None:
            return refusal
        if self._restarting is None:
            self._died_at = time.monotonic()
        self._restarting = why
        text = "The engine is gone: %s. It is started again (time %d of at most %d within %g s); %d requests wait."
        limit = self._limit
        logger.warning(text, why, limit.num_recent, limit.most, limit.window_s, len(self.entries))
        return None

    def _note_crash(self, handle: EngineProcess, why: str) -> int:
        """Take all requests back, end finished ones and a poisoned one; return its crashes."""
        open_entries = [entry for entry in self.entries.values() if not entry.has_ended]
        present = [entry for entry in open_entries if entry.is_sent and entry.is_admitted]
        is_alarmed = time.monotonic() < self._alarmed_until
        poisoned_entry = note_crash(present, self._tried, from_outside=handle.ended_from_outside, is_alarmed=is_alarmed)
        self._tried = None
        for entry in open_entries:
            if entry.is_sent:
                self.renumber(entry)
            if entry is poisoned_entry:
                self._alarmed_until = time.monotonic() + ALARM_S
                text = "Request %s ended the engine %d times at its token %d, at last alone, and is refused: %s"
                logger.error(text, entry.submit.rid, entry.num_crashes, len(entry.output), why)
                message = f"the engine died {entry.num_crashes} times of this request, the last time of it alone"
                entry.end(Finish("abort", None, message, POISON))
            elif entry.is_aborted:
                entry.end(ABORTED)
        return 0 if poisoned_entry is None else poisoned_entry.num_crashes

    def _record_recovery(self) -> None:
        took_s = time.monotonic() - self._died_at
        self._num_restarts += 1
        why, self._restarting = self._restarting, None
        num_begun = sum(bool(entry.output) for entry in self.entries.values() if not entry.has_ended)
        text = "The engine is back after %.1f s (%s); %d requests go on, %d wait as before."
        logger.warning(text, took_s, why, num_begun, len(self.entries) - num_begun)

    # ---- trials

    def _try_next(self) -> None:
        """Try the next suspect alone; where there is none, send everything: first what had begun, in order."""
        last, self._tried = self._tried, None
        if last is not None and not last.has_ended and last.submit.handle in self.entries:
            self._trial_passed(last)
        waiting = sorted(self.entries.values(), key=lambda entry: (not entry.output, entry.number))
        waiting = [entry for entry in waiting if not entry.is_sent and not entry.has_ended]
        self._tried = to_try(waiting)
        for entry in waiting if self._tried is None else [self._tried]:
            super().dispatch(entry)

    def _trial_passed(self, entry: RequestEntry) -> None:
        """Clear a poison candidate that made progress alone; it waits until the others were tried."""
        entry.num_crashes = entry.num_trials = 0
        entry.is_poison_candidate = False
        if not entry.is_aborted:  # else it is about to end
            self.send_to_engine(Abort(entry.submit.handle))
            self.renumber(entry)

    def dispatch(self, entry: RequestEntry) -> None:
        is_up = self._handle is not None and self._handle.is_ready and self._restarting is None
        if is_up and self._tried is None:
            super().dispatch(entry)

    # ---- what the engine says, and its silence

    def send_to_engine(self, message: ToEngine) -> None:
        if self._handle is not None:
            self._handle.send(message)

    def _take(self, message: FromEngine) -> None:
        self._num_heard += 1
        if isinstance(message, StepDeltas):
            self.receive(message)
            if self._tried is not None and has_got_on(self._tried):
                self._try_next()
        elif isinstance(message, Ready):
            self.receive(message)
            self._is_ready()
        elif not isinstance(message, EngineFailed) or not self._was_ready:  # else its end is near, and accounts for it
            self.receive(message)

    def _is_ready(self) -> None:
        self._was_ready = True
        if self._handle is not None:
            self._handle.is_ready = True
        self._watchdog = EngineWatchdog(self._restarts.hang_s)
        if self._restarting is not None:
            self._record_recovery()
        for command, _ in self.replies.values():
            self.send_to_engine(command)
        self._try_next()

    async def _watch(self) -> None:
        """End an engine that makes no progress; this counts as any other crash."""
        while True:
            await asyncio.sleep(self._watchdog.look_s)
            handle = self._handle
            if handle is None:
                continue
            if handle.is_connected and not handle.is_ready and self._watchdog.limit_s == CONNECT_S:
                self._watchdog = EngineWatchdog(START_STALL_S)
            late_s = self._watchdog.look(self._num_heard, is_busy=not handle.is_ready or self._is_busy)
            if late_s is not None:
                handle.has_hung = handle.is_ready
                handle.kill(self._late(handle, late_s))

    @property
    def _is_busy(self) -> bool:
        """Whether the engine has something to do or to answer."""
        if time.monotonic() < self._profiled_until:
            return False  # writing a profile holds everything up
        return bool(self.replies) or any(e.is_sent and not e.has_ended for e in self.entries.values())

    @staticmethod
    def _late(handle: EngineProcess, late_s: float) -> str:
        if not handle.is_connected:
            return f"the engine process did not connect within {late_s:.0f} s"
        if not handle.is_ready:
            return f"the engine process did not get on with its start for {late_s:.0f} s"
        return f"the engine hung: no step and no layer for {late_s:.0f} s"
