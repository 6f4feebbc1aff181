"""A replica: one server with its own engine inside a Ray actor, without an address of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from dovetail.base import log
from dovetail.contracts.errors import ConfigError, EngineError
from dovetail.processing.prepare import prepare
from dovetail_server.apis.loaded import apis_of
from dovetail_server.ray.call import ProxiedRequest, ResponseHead
from dovetail_server.ray.scaling import QUEUED, ROOM
from dovetail_server.reading.allocator import return_large_blocks
from dovetail_server.serving.hooks import ApiHooks
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import preflight
from dovetail_server.start.app import create_app
from dovetail_server.start.run import forget_secrets, get_ready, make_engine, start_engine
from dovetail_server.start.startup import StartupTimer
from dovetail_server.state import ServerState
from dovetail_server.supervision.supervisor import Supervisor

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Send

SHUTDOWN_TIMEOUT_S = 10.0
"""A request whose caller is gone ends within so long, or is cancelled."""


class ReplicaServer:
    """The application of `dovetail serve`, on the event loop that it is started on."""

    def __init__(self, settings: ServeSettings) -> None:
        """Check the model and choose the plugins; nothing is loaded yet.

        Raises:
            ConfigError: What the user can fix.
        """
        log.setup(settings.log_level, form=settings.log_format)
        prepared = prepare(preflight.with_model(settings))
        self.registry, self.plan, self._model = prepared.registry, prepared.plan, prepared.model
        self.settings = prepared.settings
        self.tasks = Supervisor()
        self.state: ServerState | None = None
        self._app: ASGIApp | None = None

    async def start(self) -> None:
        """Start the engine and wait until requests can be served.

        Raises:
            ConfigError: The engine or the tokenizer found something the user can fix.
            EngineError: The engine could not start.
        """
        forget_secrets()
        return_large_blocks()
        hooks = ApiHooks.start(self.plan)
        settings = self.settings.model_copy(update={"report_cache": bool(hooks.observers.wanting["cache_changed"])})
        engine = make_engine(settings, self.plan)
        engine.cache_watch = hooks.observers
        phases = StartupTimer()
        started = self.tasks.start("engine start", start_engine(engine, phases), is_awaited=True)
        self.state = state = ServerState(self.settings, engine, hooks, self.tasks, apis_of(self.plan))
        state.registry = self.registry
        self._app = create_app(state)
        try:
            await get_ready(state, self.registry, self.plan, self._model, started, phases)
        except BaseException:
            await self.close()
            raise
        if state.keys.watch is not None:
            self.tasks.keep("keys file", state.keys.watch.follow)
        self.tasks.keep("storage opener", state.storage.resume)
        state.bodies.warm_up()
        state.text.grammar.warm_up()
        self.tasks.keep("stat loggers", lambda: hooks.observers.log_stats(engine))
        if self.settings.log_level in ("debug", "info"):
            phases.show()

    async def close(self) -> None:
        """End the engine and everything that was started."""
        state, self.state = self.state, None
        if state is None:
            return
        state.is_draining = True
        await state.storage.close()
        await asyncio.to_thread(state.close_children)
        await self.tasks.close()
        await state.engine.close()
        await asyncio.to_thread(state.hooks.observers.close)
        state.hooks.stop()

    @property
    def running(self) -> ServerState:
        """The state of the started server.

        Raises:
            EngineError: It was closed.
        """
        if self.state is None:
            raise EngineError("this replica has ended")
        return self.state

    async def check_health(self) -> None:
        """Raise where only another server helps.

        An engine that died is started again here, and its requests go on: that is no reason. Nor is a database that
        does not answer, which another server would not reach either; `/readyz` says both.

        Raises:
            EngineError: With the reason.
        """
        state = self.running
        await state.health()
        if state.engine.restarting is not None and state.engine.dead is None:
            return
        reason = None if state.engine.dead is None else f"engine dead: {state.engine.dead}"
        if (reason := reason or state.tasks.problem or state.hooks.why_not_healthy()) is not None:
            raise EngineError(reason)

    async def _run(self, call: ProxiedRequest, receive: Receive, send: Send) -> None:
        if self._app is None:
            raise EngineError("this replica has not started")
        await self._app(scope_of(call), receive, send)

    async def answer(self, call: ProxiedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Run the application for one request; whoever closes this has left, as a client that disconnects."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        body: bytes | None = call.body

        async def receive() -> Message:
            nonlocal body
            if body is not None:
                message, body = {"type": "http.request", "body": body, "more_body": False}, None
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.put_nowait(message)

        task = self.tasks.start("request", self._run(call, receive, send), is_awaited=True)
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield ResponseHead(message["status"], list(message.get("headers", [])))
                elif message["type"] == "http.response.body" and message.get("body"):
                    yield bytes(message["body"])
            task.result()
        finally:
            gone.set()
            if not task.done():
                await asyncio.wait({task}, timeout=SHUTDOWN_TIMEOUT_S)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


def scope_of(call: ProxiedRequest) -> dict[str, Any]:
    """Return the ASGI scope of a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": [*call.headers, (b"content-length", str(len(call.body)).encode())],
        "client": ("ray", 0),
        "server": None,
        "state": {},
    }


class Replica:
    """What Ray Serve makes one of for each replica. Ray calls it ready when its constructor has returned."""

    async def __init__(self, values: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        """Start the server.

        Args:
            values: Settings of `dovetail serve`, by name.

        Raises:
            ConfigError: What the user can fix; Ray shows it as the reason why the deployment failed.
        """
        self._server: ReplicaServer | None = None
        try:
            self._server = ReplicaServer(ServeSettings(**values))
            await self._server.start()
        except ConfigError as error:
            raise ConfigError(" ".join(str(error).split())) from None

    @property
    def server(self) -> ReplicaServer:
        """The server; Ray asks nothing of a replica whose constructor failed.

        Raises:
            EngineError: It failed.
        """
        if self._server is None:
            raise EngineError("this replica has not started")
        return self._server

    async def relay(self, call: ProxiedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Answer a request: its `ResponseHead`, then the pieces of its body."""
        pieces = self.server.answer(call)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    async def check_health(self) -> None:
        """Raise where only another replica helps: Ray then ends this one and starts another.

        Raises:
            EngineError: With the reason.
        """
        await self.server.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Ray the prompt tokens of all requests that run or wait, and the tokens of the KV cache."""
        state = self.server.running
        return {QUEUED: float(state.num_live_tokens), ROOM: float(state.info.max_total_tokens)}

    async def __del__(self) -> None:
        """End the server: Ray calls and awaits this when the replica's last request has ended."""
        if self._server is not None:
            await self._server.close()
