"""A browser (Chromium of the distribution) in front of a server whose model says what it is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file

from screen import Screen

from dovetail.plugins import Registry, make_plan
from dovetail_server.testing import ScriptedServer
from dovetail_testing.vocabularies import write_tokenizer


@pytest.fixture(scope="module")
def new_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ScriptedServer]]:
    """Start servers with the parsers of Qwen3; they end with the file of tests."""
    folder = write_tokenizer(tmp_path_factory.mktemp("model"))
    plan = make_plan(Registry.scan(), reasoning_parser="qwen3", tool_parser="hermes", grammar_backend="auto")
    running: list[ScriptedServer] = []

    def start(**settings: Any) -> ScriptedServer:
        storage = tmp_path_factory.mktemp("storage")
        server = ScriptedServer(folder, plan, "Hello, world", file_storage_path=storage, **settings)
        server.state.registry = Registry.scan()
        server.engine.context_len = 8192
        server.state.text.with_engine_limits(server.engine.info, server.state.settings)
        running.append(server)
        return server

    yield start
    for server in running:
        server.close()


@pytest.fixture(scope="module")
def shared_server(new_server: Callable[..., ScriptedServer]) -> ScriptedServer:
    """The server that most tests of a file ask."""
    return new_server()


@pytest.fixture
def server(shared_server: ScriptedServer) -> ScriptedServer:
    """The shared server with a fresh engine."""
    engine = shared_server.engine
    engine.delay_s, engine.per_delta, engine.die_after, engine.dead = 0.0, 1, None, None
    engine.step = 0
    engine.submits.clear()
    shared_server.reply = "Hello, world"
    return shared_server


@pytest.fixture
def new_screen(chromium: Browser, tmp_path: Path) -> Iterator[Callable[..., Screen]]:
    """Open windows, each of a browser that has seen nothing yet; at the end none may have complained of anything."""
    screens: list[Screen] = []
    folder = Path(os.environ.get("DOVETAIL_SCREENSHOTS", tmp_path))

    def start(base: str, path: str = "/", *, width: int = 1280, height: int = 800, scheme: Any = "light") -> Screen:
        viewport: Any = {"width": width, "height": height}
        context = chromium.new_context(
            viewport=viewport, color_scheme=scheme, permissions=["clipboard-read", "clipboard-write"]
        )
        screens.append(Screen(context.new_page(), base, folder))
        screens[-1].page.goto(base + path)
        return screens[-1]

    yield start
    for screen in screens:
        screen.page.context.close()
    for screen in screens:
        screen.check()


@pytest.fixture
def screen(new_screen: Callable[..., Screen], server: ScriptedServer) -> Screen:
    """The page, ready to be typed into."""
    return new_screen(server.base).ready()


@pytest.fixture
def replying(screen: Screen) -> Callable[[str], None]:
    """Let the browser get a stream that no model of ours would send."""

    def use(body: str) -> None:
        screen.page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
        )

    return use
