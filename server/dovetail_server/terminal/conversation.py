"""What a conversation holds: its messages, and what each request asks beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import ConfigError

KINDS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
    "reasoning_effort": str,
}
"""What `/set` takes."""


@dataclass(slots=True)
class ShownReply:
    """One reply as it comes; times are of a monotonic clock."""

    sent: float
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    finish: str | None = None
    first: float | None = None

    def take_calls(self, pieces: list[dict[str, Any]]) -> None:
        """Add pieces of tool calls."""
        for piece in pieces:
            while len(self.calls) <= piece["index"]:
                self.calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call, more = self.calls[piece["index"]], piece.get("function", {})
            call["id"] = piece.get("id") or call["id"]
            for name in ("name", "arguments"):
                call["function"][name] += more.get(name) or ""

    def message(self) -> dict[str, Any]:
        """Return it as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


@dataclass(slots=True)
class ChatSession:
    """Messages, and the fields of the next request."""

    model: str
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    schema: Any = None
    fields: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the body of the next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*system, *self.messages], **self.fields}
        if self.tools:
            body["tools"] = self.tools
        if self.schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": self.schema}}
        return body

    def forget_reply(self) -> bool:
        """Take back everything after the last question; False if there is none."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return bool(self.messages)

    def set(self, name: str, text: str) -> None:
        """Set a field of the request; without a value it is left to the model.

        Raises:
            ConfigError: There is no such field, or the value is none for it.
        """
        if name not in KINDS:
            raise ConfigError(f"{name!r}: no such setting; there are {', '.join(KINDS)}")
        if not text:
            self.fields.pop(name, None)
            return
        try:
            self.fields[name] = KINDS[name](text)
        except ValueError:
            kind = {float: "a number", int: "a whole number"}[KINDS[name]]
            raise ConfigError(f"{name} {text!r}: expected {kind}") from None

    def save(self, path: Path) -> None:
        """Write the conversation: Markdown where the name ends so, else the request's body as JSON.

        Raises:
            ConfigError: The file cannot be written.
        """
        text = self._markdown() if path.suffix == ".md" else json.dumps(self.body(), indent=2, ensure_ascii=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{str(path)!r}: {error.strerror}") from None

    def _markdown(self) -> str:
        parts = [f"**System**\n\n{self.system}"] if self.system else []
        for message in self.messages:
            text = message["content"] or ""
            for call in message.get("tool_calls", ()):
                function = call["function"]
                text += f"\n\n```\n{function['name']}({function['arguments']})\n```"
            parts.append(f"**{message['role'].capitalize()}**\n\n{text.strip()}")
        return "\n\n".join(parts)


def read_json(path: str) -> Any:
    """Return what a JSON file holds.

    Raises:
        ConfigError: It cannot be read, or holds none.
    """
    try:
        return json.loads(Path(path).expanduser().read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path!r}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path!r}: not JSON: {error}") from None
