"""Brings up workers, smg and the address in front of them, and takes them down together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from pydantic import SecretStr
from starlette.applications import Starlette

from dovetail.base.process_limits import num_cores
from dovetail.contracts.errors import ConfigError, DovetailError, PluginError
from dovetail_server.gateway.child import Child, reserve_port
from dovetail_server.gateway.fan_out import FanOut
from dovetail_server.gateway.fleet import STARTING, Fleet, Worker
from dovetail_server.gateway.health import WorkerHealth
from dovetail_server.gateway.placement import check_installed
from dovetail_server.gateway.relay import Relay
from dovetail_server.gateway.server import GatewayServer
from dovetail_server.gateway.state import GatewayState
from dovetail_server.gateway.worker_settings import count_gpus, divide
from dovetail_server.http.connections import raise_file_limit
from dovetail_server.start import preflight
from dovetail_server.start.app import FORM_BYTES, make_relay_app
from dovetail_server.start.run import announce, forget_secrets, new_event_loop
from dovetail_server.start.startup import StartupTimer
from dovetail_server.supervision.supervisor import LAST_RESORT_S, SupervisedService, Supervisor

if TYPE_CHECKING:
    from dovetail_server.settings.serve import ServeSettings


def create_app(state: GatewayState) -> Starlette:
    """Build the application of one gateway: its own few routes, and the relay for all others.

    Raises:
        PluginError: An API takes a path that is the gateway's own.
    """
    upload_bytes = max(state.settings.max_body_bytes, state.settings.max_file_bytes + FORM_BYTES)
    return make_relay_app(state, FanOut(state).routes(), Relay(state), {"/v1/files": upload_bytes})


logger = logging.getLogger("dovetail.server")
WATCH_S = 0.1
RENEW_S = 600.0
"""A worker that is started anew gets so long to become ready, before the next one's turn."""


def serve(settings: ServeSettings, urls: Sequence[str] = ()) -> int:
    """Serve until a signal, with workers of this process's own, or with those at `urls`.

    Returns:
        The exit code.

    Raises:
        ConfigError: Something that the user can fix, of this process or of a worker.
        DovetailError: A worker could not start, or is gone for good.
    """
    check_installed()
    raise_file_limit()
    phases = StartupTimer()
    shares = []
    with phases.phase("checks") as notes:
        preflight.check_certificate(settings)
        preflight.check_keys(settings)
        if not urls:
            settings = preflight.with_model(settings)
            if settings.resume_key is None:
                settings = settings.model_copy(update={"resume_key": SecretStr(secrets.token_hex(24))})
            preflight.check_storage(settings)
            shares = divide(settings, count_gpus(settings), num_cores())
            notes.append(f"{len(shares)} workers, {described(shares[0])} each")
        listener = preflight.bind(settings.host, settings.port)
    held = [reserve_port() for _ in shares]
    ports = [int(one.getsockname()[1]) for one in held]
    own = [f"http://127.0.0.1:{port}" for port in ports]
    fleet = Fleet([Worker(number, url) for number, url in enumerate(own or urls)])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the HTTP server takes signals over
    tasks = Supervisor()
    with contextlib.ExitStack() as stack:
        for one in held:
            stack.enter_context(one)
        stack.enter_context(tasks.cancelling_exit())
        runner = stack.enter_context(asyncio.Runner(loop_factory=new_event_loop))
        children = [
            Child(worker, settings, port, share, tasks)
            for worker, port, share in zip(fleet.workers, ports, shares, strict=False)
        ]
        return runner.run(Gateway(settings, fleet, children, tasks).run(listener, phases))


def described(share: dict[str, object]) -> str:
    """Say what one worker gets."""
    if isinstance(devices := share.get("devices"), list):
        return f"{len(devices)} GPU{'' if len(devices) == 1 else 's'}"
    threads = share.get("num_threads", 1)
    return f"{threads} thread{'' if threads == 1 else 's'}"


class Gateway:
    """One run of it."""

    def __init__(self, settings: ServeSettings, fleet: Fleet, children: Sequence[Child], tasks: Supervisor) -> None:
        """Start nothing yet; `children` are the workers' processes, none where they are elsewhere."""
        self.settings = settings
        self.fleet = fleet
        self.children = children
        self.tasks = tasks
        self._worker_health: list[SupervisedService] = []
        self._is_renewing = self._is_renewed_again = False

    async def run(self, listener: socket.socket, phases: StartupTimer) -> int:
        """Serve until told to stop; see `serve`."""
        forget_secrets()
        state = GatewayState(self.settings, self.fleet, self.tasks)
        state.children = self.children
        try:
            app = create_app(state)
        except PluginError:
            await state.session.close()
            listener.close()
            raise
        server = GatewayServer(app, state, self._renew if self.children else None)
        own = next(iter((*self.settings.api_key, self.settings.admin_api_key)), None)
        key = None if own is None else own.get_secret_value()
        worker_health = WorkerHealth(
            self.fleet, state.session, key, are_ours=bool(self.children), resume_key=state.resume_key
        )
        try:
            await state.placement.open()
            self.tasks.keep("smg", state.placement.keep_smg)
            if state.keys.watch is not None:
                self.tasks.keep("keys file", state.keys.watch.follow)
            runs = [self.tasks.start("worker", child.keep_running(), is_awaited=True) for child in self.children]
            for worker in self.fleet.workers:
                self._worker_health.append(self.tasks.keep("worker lookout", partial(worker_health.watch, worker)))
            http = self.tasks.start("http", server.serve(sockets=[listener]), is_awaited=True)
            ready = self.tasks.start("start-up", self._get_ready(state, phases), is_awaited=True)
            try:
                await asyncio.wait({http, ready, *runs}, return_when=asyncio.FIRST_COMPLETED)
                if ready.done():
                    ready.result()
                    state.has_started = True
                    announce(self.settings, state.keys, listener, phases)
                    await asyncio.wait({http, *runs}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                server.should_exit = True
                await self.tasks.stop([ready])
                await asyncio.gather(http, return_exceptions=True)
            self._raise_failure([http, *runs])
        finally:
            await self._end(state, is_forced=server.force_exit)
            listener.close()
        return 0 if server.started else 1

    def _raise_failure(self, work: Sequence[asyncio.Task[None]]) -> None:
        """Raise why a worker is not started again, or why work that has ended should not have.

        Raises:
            DovetailError: There is a reason.
        """
        if failure := next((child.failure for child in self.children if child.failure is not None), None):
            raise failure
        for task in work:
            if not task.done() or task.cancelled() or (error := task.exception()) is None:
                continue
            self.tasks.note_crash(task.get_name(), error)
            text = f"the task {task.get_name()!r} died: {type(error).__name__}: {error}"
            raise DovetailError(f"{text}; that is a fault of Dovetail: report it with the log") from error

    async def _get_ready(self, state: GatewayState, phases: StartupTimer) -> None:
        """Wait for smg and the workers: for all of our own, for one of others.

        Raises:
            ConfigError: A worker that is there does not fit.
            DovetailError: A worker cannot start.
        """
        reported: dict[str, str] = {}
        with phases.phase("workers"):
            while not self._are_ready():
                for worker in self.fleet.workers:
                    if worker.refusal is not None:
                        raise ConfigError(worker.refusal)
                    if not self.children and reported.get(worker.tag, STARTING) != worker.why_not:
                        reported[worker.tag] = worker.why_not
                        logger.info("Waiting for worker %s at %s: %s.", worker.tag, worker.url, worker.why_not)
                await asyncio.sleep(WATCH_S)
            for worker in self.fleet.workers:
                if not worker.is_ready:
                    logger.warning("Worker %s at %s: %s.", worker.tag, worker.url, worker.why_not)
        with phases.phase("smg"):
            while not state.placement.is_up.is_set():
                if (problem := self.tasks.problem) is not None:
                    raise DovetailError(f"smg, which chooses workers, cannot be started: {problem}")
                await asyncio.sleep(WATCH_S)
        state.placement.is_serving = True

    def _are_ready(self) -> bool:
        return len(self.fleet.ready()) >= (len(self.fleet.workers) if self.children else 1)

    def _renew(self) -> None:
        if self._is_renewing:
            logger.info("SIGHUP: the workers will be restarted again after this restart.")
            self._is_renewed_again = True
            return
        logger.info("SIGHUP: restarting the workers, one after another.")
        self._is_renewing = True
        self.tasks.start("rolling restart", self._renew_all())

    async def _renew_all(self) -> None:
        """Start all workers anew, and once more if that was asked for meanwhile: two rounds at once could meet.

        Raises:
            DovetailError: One did not become ready.
        """
        try:
            await self._renew_each()
            while self._is_renewed_again:
                self._is_renewed_again = False
                await self._renew_each()
        finally:
            self._is_renewing = self._is_renewed_again = False

    async def _renew_each(self) -> None:
        """Start every worker anew; the next one when the last one serves again.

        Raises:
            DovetailError: One did not become ready.
        """
        for child in self.children:
            worker, starts = child.worker, child.num_starts
            worker.is_lost("it is restarted")
            child.restart()
            deadline = time.monotonic() + RENEW_S
            while child.num_starts == starts or not worker.is_ready:
                if child.failure is not None:
                    raise DovetailError(f"the rolling restart ends at worker {worker.tag}: {child.failure}")
                if time.monotonic() > deadline:
                    text = f"the rolling restart ends at worker {worker.tag}, which is not ready after {RENEW_S:g} s"
                    raise DovetailError(f"{text}: {worker.why_not}")
                await asyncio.sleep(WATCH_S)
        logger.info("All %d workers restarted.", len(self.children))

    async def _end(self, state: GatewayState, *, is_forced: bool) -> None:
        """End the workers, smg and the session."""
        self.tasks.exit_after(self.settings.drain_timeout + LAST_RESORT_S)
        await asyncio.gather(*(worker_health.stop() for worker_health in self._worker_health))
        await asyncio.gather(*(child.end(at_once=is_forced) for child in self.children))
        await self.tasks.close()
        await state.placement.close()
        await state.session.close()
