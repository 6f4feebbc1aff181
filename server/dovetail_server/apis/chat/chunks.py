"""Chat stream chunks as bytes, from templates: one JSON encoding of the new text per chunk and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from dovetail.contracts.output import ContentDelta, Event, Malformed, ReasoningDelta, ToolArgs, ToolEnd, ToolStart
from dovetail_server.apis.custom import custom_input

encode = msgspec.json.Encoder().encode


class ChatChunks:
    """Writes the chunks of one reply, all choices.

    Args:
        head: What every chunk carries: id, created, model, system_fingerprint.
        has_usage: Whether chunks carry a `usage` field, null until the last.
        is_legacy: Calls go out as the deprecated `function_call`.
    """

    def __init__(self, head: dict[str, Any], *, has_usage: bool, is_legacy: bool) -> None:
        common = encode({"id": head["id"], "object": "chat.completion.chunk", **head})[:-1]
        self.start = b"data: " + common + b',"choices":'
        self.end = b',"usage":null}\n\n' if has_usage else b"}\n\n"
        self.is_legacy = is_legacy
        self._prefixes: dict[int, bytes] = {}

    def delta(self, index: int, delta: bytes, logprobs: bytes, extra: bytes, usage: bytes | None) -> bytes:
        """Write one chunk around the inside of its `delta`."""
        prefix = self._prefixes.get(index)
        if prefix is None:
            prefix = self.start + b'[{"index":%d,"delta":{' % index
            self._prefixes[index] = prefix
        end = self.end if usage is None else b',"usage":' + usage + b"}\n\n"
        return b"".join((prefix, delta, b'},"logprobs":', logprobs, extra, b',"finish_reason":null}]', end))

    def role(self, index: int, usage: bytes | None, top: bytes = b"") -> bytes:
        """Write the first chunk of a choice; `top` is more of the chunk's outermost object."""
        end = self.end if usage is None else b',"usage":' + usage + b"}\n\n"
        delta = b'[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' % index
        return self.start + delta + top + end

    def finish(
        self, index: int, reason: str, matched: int | str | None, logprobs: bytes, extra: bytes, usage: bytes | None
    ) -> bytes:
        """Write the last chunk of a choice."""
        end = self.end if usage is None else b',"usage":' + usage + b"}\n\n"
        return b"".join(
            (
                self.start,
                b'[{"index":%d,"delta":{},"logprobs":' % index,
                logprobs,
                extra,
                b',"finish_reason":',
                encode(reason),
                b',"matched_stop":',
                encode(matched),
                b"}]",
                end,
            )
        )

    def usage(self, usage: bytes) -> bytes:
        """Write the usage chunk."""
        return self.start + b'[],"usage":' + usage + b"}\n\n"

    def inside(self, event: Event) -> bytes | None:
        """Return the inside of `delta` for an event, or None for one that clients do not see."""
        if isinstance(event, ContentDelta):
            return b'"content":' + encode(event.text)
        if isinstance(event, ReasoningDelta):
            text = encode(event.text)
            return b'"reasoning_content":' + text + b',"reasoning":' + text
        if isinstance(event, ToolArgs):
            piece = encode(event.json)
            if self.is_legacy:
                return b'"function_call":{"arguments":' + piece + b"}"
            return b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (event.index, piece)
        if isinstance(event, ToolStart):
            return self._tool_start(event)
        if isinstance(event, Malformed):
            return b'"content":' + encode(event.text)
        return None

    def _tool_start(self, event: ToolStart) -> bytes:
        function = {"name": event.name, "arguments": ""}
        if self.is_legacy:
            return b'"function_call":' + encode(function)
        call = {"index": event.index, "id": event.id, "type": "function", "function": function}
        return b'"tool_calls":[' + encode(call) + b"]"


class CustomChunks:
    """Writes calls of custom tools, of all choices.

    An input is a text within arguments as JSON: it is sent whole, when the call ends.

    Args:
        names: Those of the custom tools.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self._open: dict[tuple[int, int], list[str]] = {}

    def inside(self, choice: int, event: Event) -> bytes | None:
        """Return the inside of `delta` for an event of such a call, empty for none; None for any other event."""
        if isinstance(event, ToolStart) and event.name in self.names:
            self._open[choice, event.index] = []
            custom = {"name": event.name, "input": ""}
            call = {"index": event.index, "id": event.id, "type": "custom", "custom": custom}
            return b'"tool_calls":[' + encode(call) + b"]"
        if not isinstance(event, ToolArgs | ToolEnd) or (choice, event.index) not in self._open:
            return None
        if isinstance(event, ToolArgs):
            self._open[choice, event.index].append(event.json)
            return b""
        text = encode(custom_input("".join(self._open.pop((choice, event.index)))))
        return b'"tool_calls":[{"index":%d,"custom":{"input":%b}}]' % (event.index, text)
