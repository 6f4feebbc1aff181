"""From the events of a choice to output items, and to what a stream tells of them.

A full response is the fold of the same events: whoever does not stream throws them away and keeps the items.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import msgspec
from msgspec.structs import replace

from dovetail.contracts.output import (
    ContentDelta,
    Event,
    Malformed,
    ReasoningDelta,
    TokenizerView,
    ToolArgs,
    ToolEnd,
    ToolStart,
)
from dovetail.contracts.requests import JsonObject
from dovetail.messages import TokenLogprob
from dovetail_server.apis.chat.logprobs import chat_logprobs
from dovetail_server.apis.chat.schema import TokenInfo
from dovetail_server.apis.custom import custom_input
from dovetail_server.apis.responses import objects as ro
from dovetail_server.apis.responses.items import encode_reasoning, item_id
from dovetail_server.apis.responses.tool_schema import CLIENT_RUN
from dovetail_server.apis.responses.tools import client_call

# Which tokens a piece of output is made of, where events of several kinds come out of one step.
#
# Reasoning, text and calls are cut out of one sequence of tokens. A piece of text is looked for in the bytes of the
# tokens that wait; what lies before it are markers and the newlines around them, which belong to no text.


@dataclass(slots=True)
class PendingToken:
    """A token that waits: how many of its bytes do, and whether its row was handed out with the others."""

    row: TokenLogprob
    num_bytes: int
    is_given: bool = False


@dataclass(slots=True)
class TokenRows:
    """The log probabilities of a choice's tokens, handed out with the text that they make up."""

    tokenizer: TokenizerView
    _tokens: deque[PendingToken] = field(default_factory=deque)
    _bytes: bytearray = field(default_factory=bytearray)

    def add(self, rows: Sequence[TokenLogprob]) -> None:
        """Take the rows of a step."""
        for row in rows:
            data = self.tokenizer.token_bytes(row.token_id)
            self._bytes += data
            self._tokens.append(PendingToken(row, len(data)))

    def take(self, text: str) -> list[TokenLogprob]:
        """Return the rows of the tokens that `text` is made of, and forget those before it.

        Text that is in no token as it stands, such as the sign for broken UTF-8, gets all that wait.
        """
        data = text.encode("utf-8", "replace")
        start = self._bytes.find(data)
        if start < 0:
            return self._advance(len(self._bytes))
        self._advance(start, is_skipped=True)
        return self._advance(len(data))

    def skip(self, text: str) -> None:
        """Forget the tokens of `text`, if it is in them as it stands, and those before it."""
        data = text.encode("utf-8", "replace")
        start = self._bytes.find(data)
        if start >= 0:
            self._advance(start + len(data), is_skipped=True)

    def _advance(self, num_bytes: int, *, is_skipped: bool = False) -> list[TokenLogprob]:
        """Go on by so many bytes and return the rows that were not handed out before.

        A token of which a part was skipped is still to be handed out with the rest.
        """
        del self._bytes[:num_bytes]
        passed: list[TokenLogprob] = []
        while self._tokens and (num_bytes > 0 or self._tokens[0].num_bytes == 0):
            token = self._tokens[0]
            if not token.is_given:
                passed.append(token.row)
            used = min(num_bytes, token.num_bytes)
            num_bytes -= used
            token.num_bytes -= used
            if token.num_bytes:
                token.is_given = not is_skipped
                break
            self._tokens.popleft()
        return passed


class Where(TypedDict):
    """Which item an event is about."""

    item_id: str
    output_index: int


@dataclass(slots=True)
class OpenItem:
    """An item that is being written."""

    index: int
    item: ro.WrittenItem
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    is_kept_back: bool = False
    """Nothing is told of it before its end: what it is depends on the whole of its arguments."""

    @property
    def text(self) -> str:
        """What was written so far."""
        return "".join(self.pieces)

    @property
    def where(self) -> Where:
        """What an event within it carries."""
        return {"item_id": self.item.id, "output_index": self.index}


@dataclass(slots=True, kw_only=True)
class OutputBuilder:
    """Writes the output of one response.

    Attributes:
        response_id: Items' ids are made of it.
        summarises: Reasoning goes out as a summary.
        encrypts: Reasoning items carry `encrypted_content`.
        num_top: Rivals per token, or None for no log probabilities.
        calls: By a function's name what its calls become: see `ReadTools`.
        items: What is complete or begun, in order.
    """

    response_id: str
    tokenizer: TokenizerView
    summarises: bool = False
    encrypts: bool = False
    num_top: int | None = None
    calls: Mapping[str, JsonObject] = field(default_factory=dict)
    items: list[ro.OutputItem] = field(default_factory=list)
    _open: OpenItem | None = None
    _calls: dict[int, OpenItem] = field(default_factory=dict)
    _rows: TokenRows | None = None

    def __post_init__(self) -> None:
        """Follow the tokens, where their log probabilities are wanted."""
        if self.num_top is not None:
            self._rows = TokenRows(self.tokenizer)

    def take(self, events: Sequence[Event], rows: Sequence[TokenLogprob] = ()) -> list[ro.StreamEvent]:
        """Take what a step brought; `rows` are the log probabilities of its tokens."""
        new_events: list[ro.StreamEvent] = []
        if self._rows is not None:
            self._rows.add(rows)
        for event in events:
            if isinstance(event, ContentDelta | Malformed):
                self._text(event.text, new_events)
            elif isinstance(event, ReasoningDelta):
                self._reason(event.text, new_events)
            elif isinstance(event, ToolStart):
                self._start_call(event, new_events)
            elif isinstance(event, ToolArgs):
                call = self._calls[event.index]
                call.pieces.append(event.json)
                self._pass(event.json)
                if isinstance(call.item, ro.FunctionCallOutput) and not call.is_kept_back:
                    new_events.append(ro.ArgumentsDelta(**call.where, delta=event.json))
            elif isinstance(event, ToolEnd) and event.index in self._calls:
                self._close_call(self._calls.pop(event.index), "completed", new_events)
        return new_events

    def finish(self, status: ro.ItemStatus) -> list[ro.StreamEvent]:
        """End what is open; `status` is that of the last item, which alone can be cut off."""
        new_events: list[ro.StreamEvent] = []
        for call in self._calls.values():
            self._close_call(call, status, new_events)
        self._calls.clear()
        self._close(new_events, status)
        if self.items and status == "incomplete" and not isinstance(self.items[-1], ro.CompactionOutput):
            self.items[-1].status = status
        return new_events

    def _begin(self, item: ro.WrittenItem, new_events: list[ro.StreamEvent]) -> OpenItem:
        self.items.append(item)
        opened = OpenItem(len(self.items) - 1, item)
        new_events.append(ro.ItemAdded(output_index=opened.index, item=replace(item)))
        return opened

    def _id(self, kind: str) -> str:
        return item_id(self.response_id, kind, "o", len(self.items))

    # Text.

    def _text(self, text: str, new_events: list[ro.StreamEvent]) -> None:
        opened = self._open
        if opened is None or not isinstance(opened.item, ro.OutputMessage):
            self._close(new_events)
            opened = self._begin(ro.OutputMessage(id=self._id("message"), status="in_progress", content=[]), new_events)
            self._open = opened
            part = ro.OutputText(text="")
            new_events.append(ro.PartAdded(**opened.where, part=part))
        logprobs = self._logprobs_of(text)
        opened.pieces.append(text)
        opened.logprobs += logprobs
        new_events.append(ro.TextDelta(**opened.where, delta=text, logprobs=logprobs))

    def _logprobs_of(self, text: str) -> list[TokenInfo]:
        """Return the log probabilities of the tokens that `text` is made of."""
        if self.num_top is None or self._rows is None:
            return []
        return chat_logprobs(self._rows.take(text), self.num_top, self.tokenizer)

    def _pass(self, text: str) -> None:
        """Forget the tokens of text that carries no log probabilities."""
        if self._rows is not None:
            self._rows.skip(text)

    def _close(self, new_events: list[ro.StreamEvent], status: ro.ItemStatus = "completed") -> None:
        """End the open message or reasoning."""
        opened, self._open = self._open, None
        if opened is None:
            return
        opened.item.status = status
        if isinstance(opened.item, ro.OutputMessage):
            self._close_message(opened, opened.item, new_events)
        elif isinstance(opened.item, ro.ReasoningOutput):
            self._close_reasoning(opened, opened.item, new_events)
        new_events.append(ro.ItemDone(output_index=opened.index, item=replace(opened.item)))

    @staticmethod
    def _close_message(opened: OpenItem, item: ro.OutputMessage, new_events: list[ro.StreamEvent]) -> None:
        part = ro.OutputText(text=opened.text, logprobs=opened.logprobs)
        item.content = [part]
        new_events += [
            ro.TextDone(**opened.where, text=part.text, logprobs=part.logprobs),
            ro.PartDone(**opened.where, part=part),
        ]

    # Reasoning.

    def _reason(self, text: str, new_events: list[ro.StreamEvent]) -> None:
        self._pass(text)
        opened = self._open
        if opened is None or not isinstance(opened.item, ro.ReasoningOutput):
            self._close(new_events)
            opened = self._begin(ro.ReasoningOutput(id=self._id("reasoning"), status="in_progress"), new_events)
            self._open = opened
            where = opened.where
            if self.summarises:
                new_events.append(ro.SummaryPartAdded(**where, part=ro.SummaryText(text="")))
            else:
                new_events.append(ro.PartAdded(**where, part=ro.ReasoningText(text="")))
        opened.pieces.append(text)
        kind = ro.SummaryDelta if self.summarises else ro.ReasoningTextDelta
        new_events.append(kind(**opened.where, delta=text))

    def _close_reasoning(self, opened: OpenItem, item: ro.ReasoningOutput, new_events: list[ro.StreamEvent]) -> None:
        text, where = opened.text, opened.where
        if self.summarises:
            item.summary = [ro.SummaryText(text=text)]
            new_events += [ro.SummaryDone(**where, text=text), ro.SummaryPartDone(**where, part=item.summary[0])]
        else:
            item.content = [ro.ReasoningText(text=text)]
            new_events += [ro.ReasoningDone(**where, text=text), ro.PartDone(**where, part=item.content[0])]
        if self.encrypts:
            item.encrypted_content = encode_reasoning(text)

    # Calls.

    def _start_call(self, event: ToolStart, new_events: list[ro.StreamEvent]) -> None:
        self._close(new_events)
        known = self.calls.get(event.name, {})
        kind, name = known.get("type", "function"), known.get("name", event.name)
        namespace = known.get("namespace", msgspec.UNSET)
        item: ro.WrittenItem
        if kind == "custom":
            item = ro.CustomCallOutput(
                id=self._id("custom_tool_call"),
                call_id=event.id,
                name=name,
                namespace=namespace,
                input="",
                status="in_progress",
            )
        else:
            item = ro.FunctionCallOutput(
                id=self._id("function_call"),
                call_id=event.id,
                name=name,
                namespace=namespace,
                arguments="",
                status="in_progress",
            )
        is_kept_back = kind in CLIENT_RUN
        self._calls[event.index] = (
            OpenItem(-1, item, is_kept_back=True) if is_kept_back else self._begin(item, new_events)
        )

    def _close_call(self, call: OpenItem, status: ro.ItemStatus, new_events: list[ro.StreamEvent]) -> None:
        item, text = call.item, call.text
        if call.is_kept_back and isinstance(item, ro.FunctionCallOutput):
            kind = f"{item.name}_call"
            ids = {"id": self._id(kind), "call_id": item.call_id, "status": "in_progress"}
            item = client_call(item.name, ids, text) or replace(item, id=self._id("function_call"))
            call = self._begin(item, new_events)
        if isinstance(item, ro.FunctionCallOutput):
            item.arguments = text
            new_events.append(ro.ArgumentsDone(**call.where, arguments=text))
        elif isinstance(item, ro.CustomCallOutput):
            item.input = custom_input(text)
            new_events += [ro.InputDelta(**call.where, delta=item.input), ro.InputDone(**call.where, input=item.input)]
        if not isinstance(item, ro.OutputMessage | ro.ReasoningOutput):
            item.status = status
        new_events.append(ro.ItemDone(output_index=call.index, item=replace(item)))
