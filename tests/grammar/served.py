"""A server with the demo model's own engine behind it, in a thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import requests

from dovetail.client.inprocess import InProcessClient
from dovetail.plugins import PluginPlan
from dovetail.processing.plan import plan_plugins
from dovetail.processing.processor import Processor
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import preflight, run
from dovetail_testing.folder import unread_model

ASK = [{"role": "user", "content": "Tell me about France."}]


class Served:
    """A server in a thread."""

    def __init__(self, **settings: Any) -> None:
        from dovetail_server.start.app import create_app
        from dovetail_server.start.lifecycle import HttpServer
        from dovetail_server.state import ServerState

        made = preflight.with_model(
            ServeSettings(log_level="error", device="cpu", max_total_tokens=16384, port=0, **settings)
        )
        made, _, plan = plan_plugins(made, unread_model())
        self.listener = preflight.bind("127.0.0.1", 0)
        self.base = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.engine = self.make_engine(made, plan)
        self.state = ServerState(made, self.engine)
        self.server = HttpServer(create_app(self.state), self.state)
        self.text = Processor.load(made, plan, ModelFolder(made.folder, weights=False))
        self.started = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.main()), daemon=True)
        self.thread.start()
        assert self.started.wait(240)

    def make_engine(self, settings: ServeSettings, plan: PluginPlan) -> InProcessClient:
        return InProcessClient(run.engine_settings(settings), plan)

    async def main(self) -> None:
        info = await self.engine.start()
        self.state.ready_with(self.text.with_engine_limits(info, self.state.settings))
        self.started.set()
        try:
            await self.server.serve(sockets=[self.listener])
        finally:
            await self.engine.close()
            self.text.grammar.close()

    def post(self, path: str, **body: Any) -> requests.Response:
        if path != "/generate":
            body = {"model": "dovetail-demo", **body}
        return requests.post(self.base + path, json=body, timeout=120)

    def chat(self, **body: Any) -> Any:
        body = {"messages": ASK, "max_tokens": 200, "seed": 1, **body}
        reply = self.post("/v1/chat/completions", **body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        self.listener.close()
