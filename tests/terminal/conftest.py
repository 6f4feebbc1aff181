"""A server whose model says what it is told, and a conversation whose lines are given."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from dovetail_server.terminal.chat import ChatLoop
from dovetail_server.terminal.client import ServerClient
from dovetail_server.terminal.conversation import ChatSession
from dovetail_server.terminal.show import Screen
from dovetail_server.testing import ScriptedServer

Line = str | type[BaseException] | Callable[[], str]


class Talk:
    """Runs a conversation; `lines` are typed one after the other, exceptions raised, functions called for theirs."""

    def __init__(self, url: str) -> None:
        self.out = io.StringIO()
        self.lines: list[Line] = []
        self.prompts: list[str] = []
        screen = Screen(Console(file=self.out, width=200, force_terminal=False))
        self.chat = ChatLoop(ServerClient(url, None), ChatSession("scripted"), screen, self._ask)

    def _ask(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, type):
            raise line
        return line if isinstance(line, str) else line()

    def type(self, *lines: Line) -> str:
        """Type lines and return what was shown for them."""
        self.lines = list(lines)
        begin = len(self.out.getvalue())
        self.chat.run()
        return self.out.getvalue()[begin:]


@pytest.fixture
def server(dovetail_server: Callable[..., ScriptedServer]) -> ScriptedServer:
    """A server with the parsers of Qwen3."""
    return dovetail_server(reasoning_parser="qwen3", tool_parser="hermes")


@pytest.fixture
def talk(server: ScriptedServer) -> Talk:
    """A conversation with it."""
    return Talk(server.base)
