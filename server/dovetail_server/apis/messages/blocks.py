"""From the events of a choice to content blocks, and to what a stream tells of them.

A full reply is the fold of the same events: whoever does not stream throws them away and keeps the blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from dovetail.contracts.output import ContentDelta, Event, Malformed, ReasoningDelta, ToolArgs, ToolEnd, ToolStart
from dovetail_server.apis.messages.schema import TextOutput, ThinkingOutput, ToolUseOutput
from dovetail_server.apis.responses.items import encode_reasoning

Events = list[dict[str, Any]]


@dataclass(slots=True)
class Open:
    """A block that is being written."""

    index: int
    block: TextOutput | ThinkingOutput | ToolUseOutput
    pieces: list[str] = field(default_factory=list)


@dataclass(slots=True)
class BlockBuilder:
    """Writes the content of one message. With `omits` the thinking goes out in its signature only."""

    omits: bool = False
    blocks: list[TextOutput | ThinkingOutput | ToolUseOutput] = field(default_factory=list)
    _open: Open | None = None
    _calls: dict[int, Open] = field(default_factory=dict)

    def take(self, events: Sequence[Event]) -> Events:
        """Take what a step brought, and return the stream's events."""
        new_events: Events = []
        for event in events:
            if isinstance(event, ContentDelta | Malformed):
                self._text(event.text, new_events)
            elif isinstance(event, ReasoningDelta):
                self._think(event.text, new_events)
            elif isinstance(event, ToolStart):
                self._close(new_events)
                self._calls[event.index] = self._begin(
                    ToolUseOutput(id=event.id, name=event.name, input={}), new_events
                )
            elif isinstance(event, ToolArgs):
                call = self._calls[event.index]
                call.pieces.append(event.json)
                new_events.append(delta(call, "input_json_delta", "partial_json", event.json))
            elif isinstance(event, ToolEnd) and event.index in self._calls:
                self._end_call(self._calls.pop(event.index), new_events)
        return new_events

    def finish(self) -> Events:
        """End what is open."""
        new_events: Events = []
        for call in self._calls.values():
            self._end_call(call, new_events)
        self._calls.clear()
        self._close(new_events)
        return new_events

    def _begin(self, block: TextOutput | ThinkingOutput | ToolUseOutput, new_events: Events) -> Open:
        self.blocks.append(block)
        opened = Open(len(self.blocks) - 1, block)
        new_events.append({"type": "content_block_start", "index": opened.index, "content_block": block})
        return opened

    def _text(self, text: str, new_events: Events) -> None:
        opened = self._open
        if opened is None or not isinstance(opened.block, TextOutput):
            self._close(new_events)
            self._open = opened = self._begin(TextOutput(text=""), new_events)
        opened.pieces.append(text)
        new_events.append(delta(opened, "text_delta", "text", text))

    def _think(self, text: str, new_events: Events) -> None:
        opened = self._open
        if opened is None or not isinstance(opened.block, ThinkingOutput):
            self._close(new_events)
            self._open = opened = self._begin(ThinkingOutput(thinking="", signature=""), new_events)
        opened.pieces.append(text)
        if not self.omits:
            new_events.append(delta(opened, "thinking_delta", "thinking", text))

    def _close(self, new_events: Events) -> None:
        """End the open text or thinking. The block was told of empty, so it is replaced, not filled."""
        opened, self._open = self._open, None
        if opened is None:
            return
        text = "".join(opened.pieces)
        if isinstance(opened.block, TextOutput):
            self.blocks[opened.index] = TextOutput(text=text)
        else:
            sign = signature(text, carries=self.omits)
            self.blocks[opened.index] = ThinkingOutput(thinking="" if self.omits else text, signature=sign)
            new_events.append(delta(opened, "signature_delta", "signature", sign))
        new_events.append({"type": "content_block_stop", "index": opened.index})

    def _end_call(self, call: Open, new_events: Events) -> None:
        if isinstance(call.block, ToolUseOutput):
            found = input_of("".join(call.pieces))
            self.blocks[call.index] = ToolUseOutput(id=call.block.id, name=call.block.name, input=found)
        new_events.append({"type": "content_block_stop", "index": call.index})


def delta(opened: Open, kind: str, name: str, text: str) -> dict[str, Any]:
    """Return the event of more text in a block."""
    return {"type": "content_block_delta", "index": opened.index, "delta": {"type": kind, name: text}}


def signature(text: str, *, carries: bool) -> str:
    """Return what stands for the signature: a digest, or the thinking itself where it is sent nowhere else."""
    return encode_reasoning(text) if carries else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def input_of(text: str) -> dict[str, Any]:
    """Return a call's arguments as the object that the API wants; of those that were cut off, what is there."""
    try:
        value = from_json(text, allow_partial="trailing-strings") if text.strip() else {}
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": value}
