r"""`MessagesParser`: what formats share whose replies are messages with headers, as harmony's.

```
<start> HEADER <body> TEXT <end> <start> HEADER <body> TEXT <end>
```

What a message is, stands in its header; a format says so in `read`. The prompt ends inside the first header. A marker
that ends a message counts only where the arguments of a call say that it is structural: in a string it is part of it,
unless the next message or the end of the output follows.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import ClassVar, NamedTuple

from dovetail.contracts.output import (
    ContentDelta,
    Event,
    FormatSpec,
    Malformed,
    NewCall,
    ReasoningDelta,
    State,
    ToolArgs,
    ToolBody,
    ToolEnd,
    ToolEvent,
)
from dovetail.sdk.formats.detokenizer import TokenTables
from dovetail.sdk.formats.layout import FormatLayout, ReplyPhase, make_layout
from dovetail.sdk.formats.machine import IncrementalParser, new_call_id
from dovetail.sdk.formats.place import SIGNS, Place
from dovetail.sdk.formats.plain import Plain

MAX_HEADER = 512
"""Characters of the longest header; longer text is content."""


class Mark(enum.Enum):
    """What a marker of such a format is for."""

    START = "start"
    PART = "part"
    """Begins a part of a header, and a header without `START` in a message."""
    INNER = "inner"
    """Stands in headers only."""
    BODY = "body"
    END = "end"


class Header(NamedTuple):
    """What a header says of its message.

    Attributes:
        phase: Where its text goes.
        name: Of the tool, in a call whose header names it.
        body: Makes the reader of a call's text. None: it passes as written, as arguments.
        stray: What of the header belongs to none: it is content.
    """

    phase: ReplyPhase
    name: str = ""
    body: Callable[[NewCall], ToolBody] | None = None
    stray: str = ""


class MessagesParser(IncrementalParser):
    """The `OutputParser` of messages. Phases: OPEN in a header or between messages, then by what the message is.

    Attributes:
        marks: The format's markers, and what each is for.
        inner: Markers inside calls, which give their text.
        holds: Characters whose tokens are looked at more closely.
        is_spelled: Markers are plain text, which an answer may quote: within code and quotations they are text.
    """

    marks: ClassVar[Mapping[str, Mark]]
    inner: ClassVar[tuple[str, ...]] = ()
    holds: ClassVar[str] = ""
    is_spelled: ClassVar[bool] = False

    def __init__(
        self,
        spec: FormatSpec,
        tokenizer: TokenTables | None = None,
        *,
        skip_special_tokens: bool = True,
        keep_markers: bool = False,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        """Prepare; arguments as for `FormatParser`. Calls are read as calls if `spec` has a tool format."""
        added: Mapping[str, int] = {} if tokenizer is None else tokenizer.added_tokens
        marks = tuple(self.marks.items())
        super().__init__(
            _layout(
                marks,
                tuple((text, added[text]) for text in self.marks if text in added),
                frozenset(added[text] for text in self.inner if text in added),
            ),
            tokenizer,
            phase=ReplyPhase.OPEN,
            skip_special_tokens=skip_special_tokens,
            keep_markers=keep_markers,
            make_id=make_id,
        )
        self._spec = spec
        self._reads_calls = spec.tools is not None
        self._header = ""
        """What stands in the header, markers included; `_written` is the model's own part of it."""
        self._written = ""
        self._between = self._is_cut = False
        self._call: int | None = None
        self._body: ToolBody | None = None
        self._arguments = Strings()
        self._has_arguments = False
        self._closer = ""

    def read(self, header: str, written: str, marker: str) -> Header:
        """Say what a message is.

        Args:
            header: Its header, markers included.
            written: What of it the model wrote itself.
            marker: What ends the header.
        """
        raise NotImplementedError

    def explains(self, header: str, written: str) -> bool:
        """Whether a header that has no message holds nothing but what belongs there; arguments as for `read`."""
        raise NotImplementedError

    @property
    def pending_content(self) -> str:
        """Content that is held back only because it may turn out to be part of a marker."""
        return self._held if self._phase is ReplyPhase.OUT else ""

    def prime(self, prompt_tail: str) -> State:
        """Take what the template appended: the beginning of a header, or of a message."""
        self._prime(prompt_tail)
        self._written = ""
        if self._phase is ReplyPhase.TOOL:
            self._phase, self._call, self._body = ReplyPhase.OUT, None, None
        self._num_calls = 0
        return {ReplyPhase.IN: State.IN, ReplyPhase.OPEN: State.OPEN}.get(self._phase, State.OUT)

    def finish(self, reason: str) -> list[Event]:
        """Give out what was held back. The beginning of a marker is none of the text where only a marker may come."""
        in_header = bool(self._written) and self.explains(self._header, self._written)
        if self._phase is ReplyPhase.OPEN and (self._between or in_header):
            self._held, self._state = "", 0
        return super().finish(reason)

    def _finish(self, *, cut: bool) -> None:
        if self._phase is ReplyPhase.TOOL:
            self._end_call(complete=bool(self._closer) or not cut)
        elif self._phase is ReplyPhase.OPEN:
            self._is_cut = cut
            self._end_header()

    def _find_passing(self) -> Plain | None:
        if self._phase is ReplyPhase.OPEN or self._closer or (self.is_spelled and not self.place.is_settled):
            return None
        return self._passing_table(self.holds + SIGNS if self.is_spelled else self.holds)

    def _take(self, role: enum.Enum, marker: str) -> bool:
        """Act on a marker. False: it is literal text here."""
        if self._phase is not ReplyPhase.OPEN:
            if self.is_spelled and self._phase is ReplyPhase.OUT and self.place.is_quoted:
                if role is Mark.START:
                    self.place.hold_call()
                return False
            if role in (Mark.BODY, Mark.INNER):
                self._sink_closer()
                return False
            if self._is_value(role):
                self._sink_closer()
                if role is not Mark.END:
                    return False
                self._closer = marker
                return True
            self._end_message(marker if role is Mark.END else "")
        if role is Mark.END:
            self._end_header()
            self._between = True
        elif role is Mark.BODY:
            self._begin_message(marker)
        else:
            if role is Mark.START:
                self._end_header()
            self._between = False
            self._add(marker)
            if len(self._header) > MAX_HEADER:
                self._give_up("")
        return True

    def _is_value(self, role: enum.Enum) -> bool:
        """Whether a marker may be part of a string in a call's arguments."""
        if self._phase is not ReplyPhase.TOOL or (self._closer and role is Mark.START):
            return False
        return self._arguments.inside if self._body is None else self._body.inside_value

    def _sink_closer(self) -> None:
        """What looked like the end of a message was part of a string."""
        text, self._closer = self._closer, ""
        if text:
            self._sink_call(text)

    def _sink(self, text: str) -> None:
        if self._phase is ReplyPhase.OPEN:
            self._sink_header(text)
        elif self._phase is ReplyPhase.IN:
            self._text(ReasoningDelta, text)
        elif self._phase is ReplyPhase.TOOL:
            self._sink_closer()
            self._sink_call(text)
        else:
            if self.is_spelled:
                self.place.feed(text)
            self._text(ContentDelta, text)

    def _sink_call(self, text: str) -> None:
        if self._body is not None:
            self._tool_events(self._body.feed(text))
        elif self._call is not None:
            self._has_arguments = True
            self._arguments.take(text)
            self._event(ToolArgs(self._call, text))

    def _tool_events(self, events: Iterable[ToolEvent]) -> None:
        for event in events:
            self._event(event)

    def _sink_header(self, text: str) -> None:
        """Take text outside of messages. Between messages only whitespace belongs there."""
        if self._between:
            if text.isspace():
                return
            self._between = False
            self._header = self._written = ""
            self._phase = ReplyPhase.OUT
            self._sink(text.lstrip())
            return
        room = MAX_HEADER - len(self._header)
        self._add(text[: room + 1])
        if len(text) > room:
            self._give_up(text[room + 1 :])

    def _give_up(self, text: str) -> None:
        """A header is too long to be one: it is content, and so is the text behind it."""
        written, self._header, self._written = self._written, "", ""
        self._phase = ReplyPhase.OUT
        self._sink(written + text)

    def _add(self, text: str) -> None:
        self._header += text
        self._written += text

    def _begin_message(self, marker: str) -> None:
        header, written = self._header, self._written
        self._header = self._written = ""
        self._between = False
        found = self.read(header, written, marker)
        self._phase = found.phase
        is_kept = self._keep_markers and self._phase is ReplyPhase.IN  # whole, with the marker
        if self.is_spelled and found.stray:
            self.place.feed(found.stray)
        elif self.is_spelled:
            self.place = Place()
        if found.stray and not (self._priming or is_kept):
            self._event(Malformed("header", found.stray))
        if self._phase is ReplyPhase.TOOL and (self._priming or not self._reads_calls):
            self._phase = ReplyPhase.OUT
        if self._phase is ReplyPhase.TOOL:
            self._begin_call(found)
        elif self._phase is ReplyPhase.IN:
            self._trim(written + marker)

    def _begin_call(self, found: Header) -> None:
        self._arguments, self._has_arguments = Strings(), False
        if found.body is not None:
            self._body = found.body(self._new_call)
            return
        start = self._new_call(found.name)
        self._call = start.index
        self._event(start)

    def _end_message(self, marker: str) -> None:
        if self._phase is ReplyPhase.IN:
            self._trim(marker)
        elif self._phase is ReplyPhase.TOOL:
            self._end_call(complete=True)
        self._phase = ReplyPhase.OPEN

    def _end_call(self, *, complete: bool) -> None:
        self._closer = ""
        if self._body is not None:
            self._tool_events(self._body.close() if complete else self._body.cut())
            self._body = None
        if self._call is not None:
            if complete and not self._has_arguments:
                self._event(ToolArgs(self._call, "{}"))
            self._event(ToolEnd(self._call))
            self._call = None

    def _end_header(self) -> None:
        """A header ends without its message: what does not belong there is content."""
        header, written = self._header, self._written
        self._header = self._written = ""
        if written.strip() and not self.explains(header, written):
            self._event(Malformed("header", written))

    def _trim(self, text: str) -> None:
        """Drop a header or an end marker of reasoning, unless reasoning is given out as written."""
        if self._keep_markers and text:
            self._text(ReasoningDelta, text)


class Strings:
    """Follows JSON text: whether it ends inside a string. Text that begins with no bracket has none."""

    __slots__ = ("_begun", "_escaped", "_is_json", "inside")
    _STOP = re.compile(r"[\"\\]")

    def __init__(self) -> None:
        self.inside = False
        self._escaped = self._begun = self._is_json = False

    def take(self, text: str) -> None:
        """Read on."""
        if not self._begun and text.strip():
            self._begun, self._is_json = True, text.lstrip()[0] in "{["
        if not self._is_json:
            return
        pos = 0
        if self._escaped and text:
            pos, self._escaped = 1, False
        while (found := self._STOP.search(text, pos)) is not None:
            pos = found.end()
            if found[0] == '"':
                self.inside = not self.inside
            elif self.inside:
                self._escaped = pos == len(text)
                pos += 1


@lru_cache(maxsize=32)
def _layout(
    marks: tuple[tuple[str, Mark], ...], token_ids: tuple[tuple[str, int], ...], kept: frozenset[int]
) -> FormatLayout:
    """Every marker counts everywhere."""
    roles: dict[str, enum.Enum] = dict(marks)
    return make_layout(dict.fromkeys(ReplyPhase, roles), token_ids, kept)
