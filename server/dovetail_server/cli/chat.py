"""`dovetail chat`: a conversation in the terminal, with a server that runs or with one of its own."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.exits import exit_code
from dovetail_server.cli.option_tables import cut_at_dashes

if TYPE_CHECKING:
    from dovetail_server.terminal.chat import Ask
    from dovetail_server.terminal.client import ServerClient


def main(argv: list[str]) -> int:
    """Chat. Exit code 2 for what the user can fix, 1 for what the server could not do."""
    own, flags = cut_at_dashes(argv)
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="dovetail chat",
        description="Chat in the terminal. /help shows the commands; Ctrl-C stops a reply, Ctrl-D ends.",
        epilog="What follows `--` are flags of `dovetail serve`, for a server that is started here.",
    )
    parser.add_argument("model", nargs="?", help="model to serve for this chat; default: the bundled demo model")
    parser.add_argument("--url", help="address of a server that runs already, instead of a model")
    parser.add_argument("--name", help="name of the server's model; default: the first")
    parser.add_argument("--api-key", help="key of the server; default: DOVETAIL_API_KEY")
    parser.add_argument("--system", default="", help="system prompt")
    args = parser.parse_args(own)
    if args.url and (args.model or flags):
        parser.error("give a model with its flags or --url, not both")
    signal.signal(signal.SIGTERM, _leave)  # so that a server started here ends, too
    signal.signal(signal.SIGHUP, _leave)

    def work() -> int:
        with connected(args.url, args.model, flags, args.api_key) as server:
            converse(server, args.name, args.system)
        return 0

    return exit_code("chat", work)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def connected(
    url: str | None, model: str | None, flags: list[str], given_key: str | None
) -> AbstractContextManager[ServerClient]:
    """Return the server to talk with, started here if there is no address."""
    from dovetail_server.terminal.client import ServerClient, key_from
    from dovetail_server.terminal.own_server import serving

    key = key_from(given_key)
    if url is not None:
        return nullcontext(ServerClient(url, key))
    print(f"Loading {model or 'the demo model'} …", file=sys.stderr)
    return serving(model, flags, key)


def converse(server: ServerClient, name: str | None, system: str) -> None:
    """Hold the conversation.

    Raises:
        DovetailError: The server does not answer, or has no such model.
    """
    from rich.console import Console

    from dovetail_server.terminal.chat import ChatLoop
    from dovetail_server.terminal.conversation import ChatSession
    from dovetail_server.terminal.show import Screen

    names = server.models()
    if name is not None and name not in names:
        raise ConfigError(f"--name {name!r}: the server has {', '.join(names)}")
    screen = Screen(Console())
    conversation = ChatSession(name or names[0], system)
    if sys.stdin.isatty():
        screen.note(f"{conversation.model} at {server.url}. /help shows the commands.")
    ChatLoop(server, conversation, screen, asker()).run()


def asker() -> Ask:
    """Return what reads a line: an editor with a history in a terminal, plain lines elsewhere."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _plain_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory

    from dovetail_server.terminal.chat import COMMANDS

    completer = WordCompleter([f"/{name}" for name in COMMANDS], sentence=True)
    history = FileHistory(str(history_file()))
    session: PromptSession[str] = PromptSession(history=history, completer=completer, complete_while_typing=False)
    return session.prompt


def _plain_line(_: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def history_file() -> Path:
    """Return the file of what was typed; only its owner can read it."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "dovetail"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "chat_history"
    path.touch(mode=0o600)
    return path
