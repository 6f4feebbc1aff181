"""A server without a model, for tests of parsers, hooks and routes: real HTTP over an engine that says what it is told.

Loaded by pytest through the `pytest11` entry point wherever Dovetail is installed; importing it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dovetail.plugins import PluginPlan
    from dovetail_server.state import ServerState

_TIMEOUT_S = 20.0


class ScriptedServer:
    """A running server whose model says `reply`.

    Attributes:
        reply: What every request is answered with; set it between requests.
        base: Such as `http://127.0.0.1:40123`.
        engine: The scripted engine; it tells what it was asked, and can pause or die.
    """

    def __init__(self, folder: Path, plan: PluginPlan, reply: str, **settings: Any) -> None:
        """Start.

        Args:
            folder: With a tokenizer, as `write_tokenizer` writes it.
            plan: The plugins to load.
            reply: See above.
            settings: Of the server, by name.
        """
        from dovetail.processing.processor import Processor
        from dovetail.runtime.checkpoint.folder import ModelFolder
        from dovetail.text.tokenizer.tokenizer import Tokenizer
        from dovetail_server.apis.loaded import apis_of
        from dovetail_server.apis.routes import BUILT_IN
        from dovetail_server.serving.hooks import ApiHooks
        from dovetail_server.settings.serve import ServeSettings
        from dovetail_server.start import preflight
        from dovetail_server.start.app import create_app
        from dovetail_server.start.lifecycle import HttpServer
        from dovetail_server.state import ServerState
        from dovetail_testing.scripted import ScriptedEngine

        self.reply = reply
        tokenizer = Tokenizer.load(folder)
        defaults: dict[str, Any] = {"model_path": str(folder), "served_model_name": ["scripted"], "log_level": "error"}
        made = ServeSettings(**{**defaults, **settings})
        self.engine = ScriptedEngine(
            lambda submit: tokenizer.encode(self.reply, add_special_tokens=False),
            eos=tokenizer.eos_token_ids[0],
            vocab_size=tokenizer.vocab_size,
        )
        self._listener = preflight.bind("127.0.0.1", 0)
        self.base = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._hooks = ApiHooks.start(plan)
        apis = apis_of(plan) or BUILT_IN  # few tests are about APIs
        self.state: ServerState = ServerState(made, self.engine, self._hooks, apis=apis)
        self.state.ready_with(
            Processor.load(made, plan, ModelFolder(folder, weights=False)).with_engine_limits(self.engine.info, made)
        )
        self._server = HttpServer(create_app(self.state), self.state)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def get(self, path: str) -> tuple[int, Any]:
        """Send a GET, once observers know of what was before; return status and body, parsed where it is JSON."""
        self._hooks.observers.settle()
        return self._send(urllib.request.Request(self.base + path))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Send a POST of JSON; return status and body, parsed where it is JSON."""
        headers = {"content-type": "application/json"}
        return self._send(urllib.request.Request(self.base + path, json.dumps(body).encode(), headers))

    def chat(self, reply: str | None = None, **request: Any) -> dict[str, Any]:
        """Ask something, let the model say `reply`, and return the message that the client receives.

        Raises:
            RuntimeError: The status is not 200.
        """
        if reply is not None:
            self.reply = reply
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, **request}
        status, answer = self.post("/v1/chat/completions", body)
        if status != 200:
            raise RuntimeError(f"status {status}: {answer}")
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    def close(self) -> None:
        """Stop."""
        self._server.should_exit = True
        self._thread.join(10)
        self._listener.close()
        self._hooks.stop()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def _send(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                return reply.status, _parsed(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _parsed(error.read())


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


@pytest.fixture
def dovetail_server(tmp_path: Path) -> Iterator[Callable[..., ScriptedServer]]:
    """Start servers without a model: `dovetail_server("a reply", reasoning_parser="acme-r2", hooks=["acme"])`."""
    running: list[ScriptedServer] = []

    def start(
        reply: str = "Hello, world",
        *,
        reasoning_parser: str | None = None,
        tool_parser: str | None = None,
        hooks: Sequence[str] = (),
        options: dict[str, dict[str, Any]] | None = None,
        **settings: Any,
    ) -> ScriptedServer:
        from dovetail.plugins import Registry, make_plan
        from dovetail_testing.vocabularies import write_tokenizer

        plan = make_plan(
            Registry.scan(), reasoning_parser=reasoning_parser, tool_parser=tool_parser, hooks=hooks, options=options
        )
        folder = write_tokenizer(tmp_path / f"model-{len(running)}")
        running.append(ScriptedServer(folder, plan, reply, **settings))
        return running[-1]

    yield start
    for server in running:
        server.close()
