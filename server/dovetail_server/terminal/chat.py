"""A conversation in a terminal: lines that begin with / are commands, all others go to the model."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail_server.terminal.client import ServerClient
from dovetail_server.terminal.conversation import KINDS, ChatSession, ShownReply, read_json
from dovetail_server.terminal.show import Screen

# Ctrl-C while a reply comes: between two writes to the terminal, never within one.


class Interrupt:
    """Raises `KeyboardInterrupt` on SIGINT while `armed`, but not while something is `whole`.

    Rich counts how deep its writes are nested: an exception in the middle of one would leave that count wrong, and
    everything that is printed afterwards would stay in its buffer.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._is_due = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Take SIGINT over while the block runs."""
        self._is_due = False
        before = signal.signal(signal.SIGINT, self._interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let the block end before an interrupt is raised."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_due:
            self._is_due = False
            raise KeyboardInterrupt

    def _interrupted(self, _: int, __: FrameType | None) -> None:
        if not self._is_held:
            raise KeyboardInterrupt
        self._is_due = True


Ask = Callable[[str], str]
"""Shows a prompt and returns a line; raises `EOFError` at the end and `KeyboardInterrupt` on Ctrl-C."""


class Quit(Exception):
    """The conversation is over."""


class ChatLoop:
    """The loop."""

    def __init__(self, server: ServerClient, conversation: ChatSession, screen: Screen, ask: Ask) -> None:
        """Hold a conversation with a server."""
        self.server = server
        self.conversation = conversation
        self.screen = screen
        self.ask = ask
        self.interrupt = Interrupt()

    def run(self) -> None:
        """Take lines until there are no more."""
        while True:
            try:
                line = self.ask("> ").strip()
                if line.startswith("/"):
                    self.command(*line[1:].partition(" ")[::2])
                elif line:
                    self.conversation.messages.append({"role": "user", "content": line})
                    self.answer()
            except ConfigError as error:
                self.screen.problem(str(error))
            except KeyboardInterrupt:
                self.screen.note("Ctrl-D or /quit ends the conversation.")
            except (EOFError, Quit):
                return

    def command(self, name: str, rest: str) -> None:
        """Run a command.

        Raises:
            ConfigError: There is none of this name, or it cannot be done.
            Quit: It was the last.
        """
        if name not in COMMANDS:
            raise ConfigError(f"/{name}: no such command; there are {', '.join(f'/{one}' for one in COMMANDS)}")
        COMMANDS[name][1](self, rest.strip())

    def answer(self) -> None:
        """Have the last message answered, and the tools that the reply calls with it."""
        while True:
            reply = self.receive()
            if reply is None:
                return
            self.conversation.messages.append(reply.message())
            if not reply.calls or not self.take_results(reply):
                return

    def receive(self) -> ShownReply | None:
        """Show one reply; None if nothing came of it. Ctrl-C stops the reply and keeps what came."""
        reply, note = ShownReply(sent=time.monotonic()), ""
        self.screen.begin()
        try:
            with self.interrupt.armed(), closing(self.server.chat(self.conversation.body())) as chunks:
                for chunk in chunks:
                    with self.interrupt.whole():
                        self.take(reply, chunk)
        except KeyboardInterrupt:
            note = "stopped"
        except DovetailError as error:
            note = str(error)
        has_come = bool(reply.content or reply.reasoning or reply.calls)
        if note and note != "stopped":
            self.screen.end(reply, 0.0, " ")
            self.screen.problem(note)
            self.screen.note("/retry asks again." if has_come else "The question is kept; /retry asks it again.")
        else:
            self.screen.end(reply, time.monotonic() - reply.sent, note)
        if note:
            reply.calls.clear()  # half of one cannot be answered
        return reply if has_come else None

    def take(self, reply: ShownReply, chunk: dict[str, Any]) -> None:
        """Add and show one chunk."""
        reply.usage = chunk.get("usage") or reply.usage
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            if delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
                reply.first = reply.first or time.monotonic()
            if thought := delta.get("reasoning_content"):
                reply.reasoning += thought
                self.screen.text(thought, "dim italic")
            if text := delta.get("content"):
                reply.content += text
                self.screen.text(text, "default")
            reply.take_calls(delta.get("tool_calls") or [])
            reply.report = choice.get("structured_output") or reply.report
            reply.finish = choice.get("finish_reason") or reply.finish

    def take_results(self, reply: ShownReply) -> bool:
        """Ask for what the called tools give back; False if somebody would rather not say."""
        results = []
        try:
            for call in reply.calls:
                text = self.ask(f"{call['function']['name']} gives back> ")
                results.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        except (KeyboardInterrupt, EOFError):
            self.screen.note("No result was given; the call is taken back.")
            self.conversation.messages.pop()
            return False
        self.conversation.messages += results
        return True

    def set_system(self, text: str) -> None:
        """`/system`."""
        self.conversation.system = text
        self.screen.note("The system prompt is set." if text else "There is no system prompt.")

    def set_tools(self, path: str) -> None:
        """`/tool`."""
        if not path or path == "off":
            self.conversation.tools = []
            self.screen.note("There are no tools.")
            return
        value = read_json(path)
        tools = value if isinstance(value, list) else [value]
        for tool in tools:
            if not isinstance(tool, dict) or not ("function" in tool or "name" in tool):
                raise ConfigError(f"{path!r}: expected a function, or a list of functions, as OpenAI's API takes them")
        self.conversation.tools += [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
        ]
        names = [str(tool["function"].get("name")) for tool in self.conversation.tools]
        self.screen.note(f"Tools: {', '.join(names)}.")

    def set_schema(self, path: str) -> None:
        """`/schema`."""
        if not path or path == "off":
            self.conversation.schema = None
            self.screen.note("Replies are text.")
            return
        value = read_json(path)
        if not isinstance(value, dict):
            raise ConfigError(f"{path!r}: expected a JSON schema, an object")
        self.conversation.schema = value
        self.screen.note("Replies are JSON of this schema.")

    def set_field(self, rest: str) -> None:
        """`/set`."""
        name, _, value = rest.partition(" ")
        if name:
            self.conversation.set(name, value.strip())
        shown = ", ".join(f"{key} {value}" for key, value in self.conversation.fields.items())
        self.screen.note(shown or f"Nothing is set; there are {', '.join(KINDS)}.")

    def save(self, path: str) -> None:
        """`/save`."""
        if not path:
            raise ConfigError("/save: expected a file; .md for Markdown, JSON otherwise")
        self.conversation.save(Path(path).expanduser())
        self.screen.note(f"Saved to {path}.")

    def retry(self, _: str) -> None:
        """`/retry`."""
        if not self.conversation.forget_reply():
            raise ConfigError("/retry: nothing was asked yet")
        self.answer()

    def renew(self, _: str) -> None:
        """`/new`."""
        self.conversation.messages.clear()
        self.screen.note("A new conversation; system prompt, tools and settings are kept.")

    def help(self, _: str) -> None:
        """`/help`."""
        for name, (about, _run) in COMMANDS.items():
            self.screen.note(f"/{name:<8} {about}")
        self.screen.note("Ctrl-C stops a reply, Ctrl-D ends the conversation.")

    def quit(self, _: str) -> None:
        """`/quit`."""
        raise Quit


COMMANDS: dict[str, tuple[str, Callable[[ChatLoop, str], None]]] = {
    "system": ("TEXT: the system prompt; nothing takes it away", ChatLoop.set_system),
    "tool": ("FILE: add functions from a JSON file; `off` takes all away", ChatLoop.set_tools),
    "schema": ("FILE: replies are JSON of this schema; `off` for text", ChatLoop.set_schema),
    "set": ("NAME VALUE: temperature, max_tokens, seed, …; without a value: left to the model", ChatLoop.set_field),
    "retry": ("ask the last question again", ChatLoop.retry),
    "new": ("forget what was said", ChatLoop.renew),
    "save": ("FILE: write the conversation, as Markdown (.md) or JSON", ChatLoop.save),
    "help": ("this list", ChatLoop.help),
    "quit": ("end the conversation", ChatLoop.quit),
}
