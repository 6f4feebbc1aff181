"""Brings up engine, tokenizer and HTTP server at the same time, and takes them down together."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING

from dovetail.base.distribution import DISTRIBUTION
from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import EngineError
from dovetail.engine.client import EngineClient
from dovetail.engine.streams import CLOSED
from dovetail.messages import EngineInfo
from dovetail.processing.plugin_settings import ENV_PREFIX, is_secret
from dovetail_server.reading.allocator import return_large_blocks
from dovetail_server.reading.threads import num_threads, set_threads
from dovetail_server.serving.hooks import ApiHooks
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start.startup import ENGINE, StartupTimer, engine_notes
from dovetail_server.supervision import imports
from dovetail_server.supervision.supervisor import LAST_RESORT_S, Supervisor

if TYPE_CHECKING:
    from dovetail.contracts.api import Api
    from dovetail.plugins import PluginPlan, Registry
    from dovetail.processing.processor import Processor
    from dovetail.runtime.checkpoint.folder import ModelFolder
    from dovetail_server.http.auth import Keys
    from dovetail_server.start.lifecycle import HttpServer
    from dovetail_server.state import ServerState

logger = logging.getLogger("dovetail.server")
WATCH_S = 0.25
LOOPBACK = ("127.", "::1", "localhost")
STORAGE = ("dovetail_server.batches.service", "dovetail_server.storage.upload")
SENDING = ("anyio._core._fileio", "anyio._backends._asyncio")
"""What starlette sends files with; the names are anyio's own affair."""
ANNOUNCEMENTS = ("Serving ", "Chat in a browser: ", "The server is fired up")
"""How the lines begin that tell where a server is: those of a worker behind another address are dropped."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop where there is one: everywhere but on Windows."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def engine_settings(settings: ServeSettings) -> EngineSettings:
    """Return the engine's part of the settings."""
    return EngineSettings(**{name: getattr(settings, name) for name in EngineSettings.model_fields})


def make_engine(settings: ServeSettings, plan: PluginPlan) -> EngineClient:
    """Make the client of an engine in its own process."""
    from dovetail_server.supervision.engine_process import ProcessClient, Restarts

    restarts = Restarts(
        max_restarts=settings.max_engine_restarts,
        window_s=settings.engine_restart_window,
        hang_s=settings.engine_hang_timeout,
    )
    return ProcessClient(engine_settings(settings), plan, log_level=settings.log_level, restarts=restarts)


async def run(
    settings: ServeSettings,
    registry: Registry,
    plan: PluginPlan,
    model: ModelFolder,
    listener: socket.socket,
    phases: StartupTimer,
    tasks: Supervisor,
) -> int:
    """Serve until told to stop.

    Returns:
        The exit code.

    Raises:
        ConfigError: The engine or the tokenizer found something the user can fix.
        EngineError: The engine could not start, or is gone for good.
    """
    hooks = ApiHooks()
    engine: EngineClient | None = None
    server: HttpServer | None = None
    forget_secrets()
    return_large_blocks()
    set_threads(num_threads())
    try:
        hooks = ApiHooks.start(plan)
        apis = await asyncio.to_thread(load_apis, plan) if has_foreign(plan) else None
        engine = make_engine(
            settings.model_copy(update={"report_cache": bool(hooks.observers.wanting["cache_changed"])}), plan
        )
        engine.cache_watch = hooks.observers
        engine_start = tasks.start("engine start", start_engine(engine, phases), is_awaited=True)
        await asyncio.sleep(0)  # the engine process is on its way before our own imports keep this thread busy
        server = await asyncio.to_thread(build_http, settings, engine, hooks, phases, tasks, plan, apis)
        server.state.registry = registry
        http = tasks.start("http", server.serve(sockets=[listener]), is_awaited=True)
        start_up = get_ready(server.state, registry, plan, model, engine_start, phases)
        ready = tasks.start("start-up", start_up, is_awaited=True)
        try:
            await asyncio.wait({http, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                announce(settings, server.state.keys, listener, phases)
                keep_running(server)
            await http
        finally:
            server.should_exit = True
            if not ready.done():
                await tasks.stop([ready, engine_start])
            await asyncio.gather(http, return_exceptions=True)
        if engine.dead not in (None, CLOSED):
            raise EngineError(f"the engine is gone: {engine.dead}")
    finally:
        tasks.exit_after(LAST_RESORT_S)
        await tasks.close()
        if engine is not None:
            await engine.close(wait=server is None or not server.force_exit)
        listener.close()
        hooks.stop()
    return 0 if server.started else 1


def forget_secrets() -> None:
    """Take what only the settings need out of the environment, which every process started from here on inherits."""
    for name, field in ServeSettings.model_fields.items():
        if is_secret(field):
            os.environ.pop(f"{ENV_PREFIX}{name.upper()}", None)


def keep_running(server: HttpServer) -> None:
    """Start what goes on beside the requests, until the server ends."""
    state = server.state
    if state.keys.watch is not None:
        state.tasks.keep("keys file", state.keys.watch.follow)
    state.tasks.keep("engine watcher", lambda: watch_engine(server))
    state.tasks.keep("storage opener", state.storage.resume)
    state.bodies.warm_up()
    state.text.grammar.warm_up()
    state.tasks.keep("stat loggers", lambda: state.hooks.observers.log_stats(state.engine))


async def start_engine(engine: EngineClient, phases: StartupTimer) -> EngineInfo:
    """Start the engine process and wait for it."""
    with phases.phase(ENGINE) as notes:
        info = await engine.start()
        notes.extend(engine_notes(info))
    return info


async def watch_engine(server: HttpServer) -> None:
    """End the server when the engine is gone for good: whoever started it can start it again, and knows why."""
    engine = server.state.engine
    while engine.dead is None:
        await asyncio.sleep(WATCH_S)
    if engine.dead != CLOSED:
        server.should_exit = True


def has_foreign(plan: PluginPlan) -> bool:
    """Whether packages bring APIs, which may be in each other's way."""
    return any(planned.distribution != DISTRIBUTION for planned in plan.of_kind("api"))


def load_apis(plan: PluginPlan) -> list[Api]:
    """Make the APIs and hold them against each other and the server's own routes.

    Raises:
        PluginError: One cannot be made, or is in the way of another.
    """
    with imports.for_good():
        from dovetail_server.apis.loaded import apis_of
        from dovetail_server.start.app import check_apis
    apis = apis_of(plan)
    check_apis(apis)
    return apis


def build_http(
    settings: ServeSettings,
    engine: EngineClient,
    hooks: ApiHooks,
    phases: StartupTimer,
    tasks: Supervisor,
    plan: PluginPlan,
    apis: list[Api] | None,
) -> HttpServer:
    """Import the web framework and build the application; runs in a thread beside the engine's start."""
    with phases.phase("http"):
        with imports.for_good():
            from dovetail_server.start.app import create_app
            from dovetail_server.start.lifecycle import HttpServer
            from dovetail_server.state import ServerState
        state = ServerState(settings, engine, hooks, tasks, load_apis(plan) if apis is None else apis)
        return HttpServer(create_app(state), state)


async def get_ready(
    state: ServerState,
    registry: Registry,
    plan: PluginPlan,
    model: ModelFolder,
    engine_start: asyncio.Task[EngineInfo],
    phases: StartupTimer,
) -> None:
    """Load the text tools, wait for the engine, and open the doors."""
    text = await asyncio.to_thread(load_text, state.settings, plan, model, phases)
    for record in text.plugin_states:
        registry.mark(*record)
    await asyncio.to_thread(import_storage)
    info = await engine_start
    mark_active(registry, plan, info)
    imports.started()
    state.ready_with(await asyncio.to_thread(text.with_engine_limits, info, state.settings))


def mark_active(registry: Registry, plan: PluginPlan, info: EngineInfo) -> None:
    """Note in the registry what the engine loaded, and which plugins serve from now on."""
    for record in info.plugins:
        registry.mark(*record)
    in_use = {
        "attention_backend": set(info.attention_backend.split("+")),
        "kernels": {name for use in info.kernels for _, _, name in use.served},
    }
    for planned in plan.plugins:
        is_chosen = planned.kind not in in_use or planned.name in in_use[planned.kind]
        loaded = {r.qualified for r in registry.of_kind(planned.kind) if r.state == "loaded"}
        if is_chosen and planned.qualified in loaded:
            registry.mark(planned.kind, planned.qualified, "active")


def load_text(settings: ServeSettings, plan: PluginPlan, model: ModelFolder, phases: StartupTimer) -> Processor:
    """Load tokenizer, template and parsers."""
    with phases.phase("tokenizer and parsers") as notes:
        from dovetail.processing.processor import Processor

        text = Processor.load(settings, plan, model)
        notes.extend(text.notes())
    return text


def import_storage() -> None:
    """Import what opens files, batches and stored responses, for the first request that asks for them.

    Beside the engine's start, not then: importing keeps the interpreter from all other requests.
    """
    with imports.for_good():
        for name in STORAGE:
            importlib.import_module(name)
        for name in SENDING:
            with contextlib.suppress(ImportError):  # where it has moved, whoever needs it imports it
                importlib.import_module(name)


def announce(settings: ServeSettings, keys: Keys, listener: socket.socket, phases: StartupTimer) -> None:
    """Show the phase table, the address, and the line that scripts wait for."""
    host, port = listener.getsockname()[:2]
    phases.show()
    for line in settings.auto_notes:
        logger.info("%s", line)
    if not str(host).startswith(LOOPBACK) and not keys.are_needed:
        logger.warning("!" * 100)
        logger.warning(
            "Listening on %s WITHOUT A KEY: any client that reaches port %d can use the model and every file. "
            "Give --api-key (or DOVETAIL_API_KEY) or --keys-file, or --host 127.0.0.1.",
            host,
            port,
        )
        logger.warning("!" * 100)
    if keys.num_keys > 1 and settings.isolate_prefix_cache == "shared":
        logger.info(
            "%d keys share one prefix cache: cached_tokens and times tell a key what others have sent. "
            "--isolate-prefix-cache key keeps them apart.",
            keys.num_keys,
        )
    shown = "127.0.0.1" if host in {"0.0.0.0", "::"} else host
    names = ", ".join(settings.served_model_name or [str(settings.model_path)])
    scheme = "http" if settings.ssl_certfile is None else "https"
    logger.info("Serving %s at %s://%s:%d/v1 (documentation: /docs)", names, scheme, shown, port)
    if not settings.disable_playground:
        logger.info("Chat in a browser: %s://%s:%d", scheme, shown, port)
    logger.info("The server is fired up and ready to roll!")
