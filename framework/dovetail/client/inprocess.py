"""The client of an engine in a thread of this process: for the offline `LLM` and for tests."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading

import msgspec

from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import ConfigError, said
from dovetail.engine.loop import ClosedError, run_loop
from dovetail.engine.streams import CLOSED, StreamClient
from dovetail.messages import Control, EngineFailed, EngineInfo, FromEngine, Ready, ToEngine
from dovetail.plugins import PluginPlan, load
from dovetail.plugins.loader import naming_plugin
from dovetail.plugins.manager import running_hooks


class InProcessClient(StreamClient):
    """Runs the same loop as the engine process, with queues for a socket."""

    def __init__(self, settings: EngineSettings, plan: PluginPlan) -> None:
        super().__init__(seed=settings.random_seed)
        self._settings, self._plan = settings, plan
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def start(self) -> EngineInfo:
        """See `EngineClient.start`."""
        self._loop = asyncio.get_running_loop()
        self.started = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="dovetail-engine", daemon=True)
        self._thread.start()
        return await self.started

    async def close(self, *, wait: bool = True) -> None:
        """See `EngineClient.close`."""
        if self._thread is not None and self._thread.is_alive():
            self.send_to_engine(Control(id=0, op="shutdown"))
            if wait:
                await asyncio.to_thread(self._thread.join)
        self.engine_died(CLOSED)

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """See `Transport.poll`; called by the engine's thread."""
        messages: list[ToEngine] = []
        try:
            if timeout_s > 0:
                messages.append(self._inbox.get(timeout=timeout_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def send(self, message: FromEngine) -> None:
        """See `Transport.send`; called by the engine's thread."""
        if self._loop is None or self._loop.is_closed():
            raise ClosedError("the event loop is closed")
        try:
            self._loop.call_soon_threadsafe(self.receive, message)
        except RuntimeError as error:  # closed between the check and the call
            raise ClosedError(str(error)) from None

    def send_to_engine(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def _run(self) -> None:
        why = "the engine's thread ended"
        try:
            plugins = load(self._plan, "engine")
            with running_hooks(plugins):
                from dovetail.client.launch import make_engine  # imports torch

                with naming_plugin(plugins):
                    core = make_engine(self._settings, plugins)
                self.send(Ready(msgspec.structs.replace(core.info, plugins=plugins.states())))
                run_loop(core, self)
        except ConfigError as error:
            self._deliver(EngineFailed(said(error), user_error=True))
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            if not isinstance(error, Exception | SystemExit):
                raise
        finally:
            # The last resort of the thread, whatever ended it: whoever waits for the engine must hear of it.
            self._deliver(EngineFailed(why, user_error=False))

    def _deliver(self, message: EngineFailed) -> None:
        with contextlib.suppress(ClosedError):
            self.send(message)
