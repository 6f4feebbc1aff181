"""A real HTTP server in a thread of the test's process, over a scripted engine; the fixtures of its folders."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
from fake_engine import FakeEngine
from server_tiny import tokenizer, write_model

from dovetail.contracts.api import Api
from dovetail.contracts.reasoning import ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.plugins import PluginPlan, Registry
from dovetail.plugins.plan import as_planned
from dovetail.processing.processor import Processor, ProcessorSetup
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.text.chat.template import ChatTemplate
from dovetail_server.apis.routes import BUILT_IN
from dovetail_server.serving.hooks import ApiHooks
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import preflight
from dovetail_server.start.app import create_app
from dovetail_server.start.lifecycle import HttpServer
from dovetail_server.state import ServerState

LIMIT_S = 240
"""For a reply, or what is to come true: shorter than the limit of a test, and long enough for what starts a process
on a busy machine."""


def setup_of(folder: Path, settings: ServeSettings, *parsers: Any) -> ProcessorSetup | None:
    """Say how another process gets the same text tools; None for parsers that only this one has."""
    targets = [f"{type(parser).__module__}:{type(parser).__qualname__}" for parser in parsers if parser is not None]
    records = {record.target: record for record in Registry.scan().records} if targets else {}
    if not records.keys() >= set(targets):
        return None
    plan = PluginPlan(plugins=tuple(as_planned(records[target]) for target in targets))
    return ProcessorSetup(folder=str(folder), model=str(folder), chat_template=settings.chat_template, plan=plan)


class Harness:
    """A real HTTP server in a thread, over a scripted engine."""

    def __init__(
        self,
        folder: Path,
        *,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        is_ready: bool = True,
        hooks: ApiHooks | None = None,
        context_len: int = 512,
        apis: Sequence[Api] = BUILT_IN,
        **settings: Any,
    ) -> None:
        self.tokenizer = tokenizer(folder)
        self.context_len = context_len
        self.listener = preflight.bind("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        # Of its own: beside another server of a session, either would run the lines of a batch.
        settings.setdefault("file_storage_path", Path(tempfile.mkdtemp(prefix="storage", dir=folder)))
        settings = {"served_model_name": ["tiny", "tiny-too"], **settings}
        self.settings = ServeSettings(model_path=str(folder), log_level="error", **settings)
        self.reset()
        self.state = ServerState(self.settings, self.engine, hooks, apis=apis)
        template = ChatTemplate.load(self.tokenizer.files, self.settings.chat_template)
        setup = setup_of(folder, self.settings, reasoning, tools)
        self.tools = Processor(
            self.tokenizer, template, reasoning=reasoning, tools=tools, setup=setup, model=ModelFolder(folder)
        )
        if is_ready:
            self.make_ready()
        self.server = HttpServer(create_app(self.state), self.state)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.http = requests.Session()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.server.serve(sockets=[self.listener]))
        self.loop.run_until_complete(asyncio.sleep(0.01))  # connections that are closing end
        self.loop.close()

    def reset(self) -> None:
        """Give the server a fresh engine that says `self.text`."""
        self.text = "Hello, world"
        self.engine = FakeEngine(
            lambda submit: self.tokenizer.encode(self.text, add_special_tokens=False),
            eos=self.tokenizer.added_tokens["<|im_end|>"],
            vocab_size=self.tokenizer.vocab_size,
            context_len=self.context_len,
        )
        if hasattr(self, "state"):
            self.state.engine = self.engine

    def eventually(self, condition: Callable[[], bool], timeout: float = LIMIT_S) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.005)

    def make_ready(self) -> None:
        self.state.ready_with(self.tools.with_engine_limits(self.engine.info, self.settings))

    def post(self, path: str, body: Any = None, **kwargs: Any) -> requests.Response:
        if body is not None:
            kwargs["json"] = body
        return self.http.post(self.base + path, timeout=LIMIT_S, **kwargs)

    def get(self, path: str, **kwargs: Any) -> requests.Response:
        return self.http.get(self.base + path, timeout=LIMIT_S, **kwargs)

    def close(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(60)
        self.listener.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_harness(folder: Path) -> Iterator[Callable[..., Harness]]:
    """Make servers with other settings."""
    running: list[Harness] = []

    def make(**options: Any) -> Harness:
        running.append(Harness(folder, **options))
        return running[-1]

    yield make
    for each in running:
        each.close()
