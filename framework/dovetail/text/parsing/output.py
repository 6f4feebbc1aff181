r"""The output parser: one incremental machine that splits a reply into reasoning, content and tool calls.

It is fed tokens as they come, or text where there are no ids; a full reply is the fold of the same events
(`parse_full`), so what a client receives never depends on how the stream was cut. Text passes three stations: decoding
and markers, which `machine.py` describes, and

3. *Sinks*: by phase, to reasoning, content or the reader of a tool section. The newlines that the template puts around
   markers are dropped here: those behind a marker as they come, those before one by holding newlines back.

A marker inside a value is structural only where nothing but the next section, or the end of the output, follows it:
`{"city": "the tag </tool_call> ends a call"}` is one value, whether the marker is a token or spelled. Noise in a
section is held for a while: if a call follows, it is content without the section's markers, else with them.

Nothing is lost: every character goes to exactly one sink, or belongs to a marker and its newlines. Whitespace alone
before thinking, or before, between or after tool calls, is no content. All work is linear in the output.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from dovetail.contracts.output import (
    ContentDelta,
    Event,
    FormatSpec,
    Malformed,
    Markers,
    ReasoningDelta,
    State,
    ToolArgs,
    ToolBody,
    ToolEvent,
    ToolStart,
)
from dovetail.text.parsing.layout import ReplyPhase, Role, compile_layout
from dovetail.text.parsing.machine import IncrementalParser, new_call_id
from dovetail.text.parsing.plain import Plain
from dovetail.text.parsing.reply import Folded, ToolCall, fold
from dovetail.text.tokenizer.tokenizer import Tokenizer

MAX_NOISE = 512
"""Characters of noise in a section that are held until it is known whether a call follows."""

__all__ = ["Folded", "FormatParser", "ToolCall", "fold", "make_parser", "new_call_id", "parse_full"]


class FormatParser(IncrementalParser):
    """The `OutputParser` of a `FormatSpec` without a machine of its own, for one choice."""

    def __init__(
        self,
        spec: FormatSpec,
        tokenizer: Tokenizer | None = None,
        *,
        skip_special_tokens: bool = True,
        keep_markers: bool = False,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        """Prepare.

        Args:
            spec: The format.
            tokenizer: The model's; None if only text will be fed.
            skip_special_tokens: Special tokens that are no markers give no text.
            keep_markers: Reasoning is given out as the model wrote it, its markers and newlines included.
            make_id: Makes the ids of tool calls.
        """
        super().__init__(
            compile_layout(spec, {} if tokenizer is None else tokenizer.added_tokens),
            tokenizer,
            phase=ReplyPhase.OUT if spec.reasoning is None else ReplyPhase(spec.initial.value),
            skip_special_tokens=skip_special_tokens,
            keep_markers=keep_markers,
            make_id=make_id,
        )
        self._markers = spec.reasoning or Markers("", "")
        self._tools = spec.tools
        self._held_in = "" if keep_markers else self._newlines_in_thinking()
        self._answer = spec.answer
        self._answers = self._answered = False
        self._trailing = (spec.tools.before_start if spec.tools else "") or (
            spec.answer.before_end if spec.answer else ""
        )
        self._skip = self._markers.after_start if self._phase is ReplyPhase.IN else ""
        self._begun = False
        self._unclosed = False
        self._tail = ""
        self._lead: list[str] | None = self._new_lead()
        self._body: ToolBody | None = None
        self._opening = ""
        self._explained = False
        self._broken = False
        self._noise: list[str] = []
        self._noise_len = 0
        self._closer: list[str] = []

    @property
    def pending_content(self) -> str:
        """Content that is held back only because it may turn out to be part of a marker or its newlines."""
        if self._lead is not None or self._phase in (ReplyPhase.IN, ReplyPhase.TOOL):
            return ""
        return self._tail + self._held

    def prime(self, prompt_tail: str) -> State:
        """Take what the template appended to the prompt, before anything is fed. Tool markers there mean nothing."""
        if self._markers.start:
            self._phase, self._skip = ReplyPhase.OPEN, ""
        self._lead = self._new_lead()
        self._prime(prompt_tail)
        self._tail, self._lead = "", self._new_lead()
        return State(self._phase.value)

    def _finish(self, *, cut: bool) -> None:
        if self._phase is ReplyPhase.TOOL:
            self._close_section("".join(self._closer[:1]), cut=cut and not self._closer)
        elif self._phase is ReplyPhase.IN:
            self._text(ReasoningDelta, self._tail)
        else:
            if self._lead and not self._num_calls:
                self._text(ContentDelta, "".join(self._lead))
            self._text(ContentDelta, self._tail)
        self._tail, self._lead = "", None

    @property
    def _begins_answer(self) -> bool:
        return self._lead is not None

    def _find_passing(self) -> Plain | None:
        if self._skip:
            return None
        if self._phase is ReplyPhase.TOOL:
            return None if self._closer else self._passing_table()
        if self._lead is not None or self._tail or (self._phase is ReplyPhase.IN and not self._begun):
            return None
        return self._passing_table(self._held_in if self._phase is ReplyPhase.IN else self._trailing)

    def _pass_call(self, piece: str) -> list[Event]:
        events = self._body.feed(piece) if self._body is not None else []
        if not events:
            return []
        if len(events) == 1:
            kind = type(events[0])
            if kind is ToolArgs or (kind is Malformed and not self._opening):
                return cast("list[Event]", events)
        self._tool_events(events)
        return self._drain()

    # What markers do.

    def _take(self, role: enum.Enum, marker: str, *, spelled: bool) -> bool:
        """Act on a marker. False: it is literal text here."""
        if role is Role.START:
            return self._take_start(marker)
        if role is Role.END:
            return self._take_end(marker)
        if role is Role.ANSWER_END and not self._answers and marker == self._markers.end:
            return self._take_end(marker)
        if role in (Role.ANSWER_START, Role.ANSWER_END):
            return self._take_answer(role)
        if role is Role.BREAK:
            if not self._priming:
                self._text(ReasoningDelta, self._tail)
                self._leave_thinking()
            return False
        if role is Role.DROPPED:
            if self._phase is ReplyPhase.IN:
                self._leave_thinking()
            self._skip = ""
            return True
        if self._priming:
            return False
        if self._phase is ReplyPhase.TOOL:
            if self._body is not None and self._body.inside_value and not (self._closer and role is Role.TOOL_START):
                self._take_inside_value(role, marker)
                return True
            self._close_section(marker if role is Role.TOOL_END else "")
        if role is Role.TOOL_START:
            self._open_section(marker)
        elif role in (Role.TOOL_TEXT, Role.TOOL_BARE):
            self._open_section("")
            self._sink(marker)
        return True

    def _take_inside_value(self, role: enum.Enum, marker: str) -> None:
        """A marker in a value is part of it; one that closes the section waits for what follows it."""
        self._sink_pending()
        if role is Role.TOOL_END:
            self._closer = [marker]
        else:
            self._feed_body(marker)

    def _sink_pending(self) -> None:
        """What looked like the section's end was part of a value."""
        text, self._closer = "".join(self._closer), []
        if text:
            self._feed_body(text)

    def _feed_body(self, text: str) -> None:
        if self._body is not None:
            self._tool_events(self._body.feed(text))

    def _take_start(self, marker: str) -> bool:
        if self._phase is ReplyPhase.IN and self._begun:
            return False
        if self._phase is ReplyPhase.OPEN:
            self._text(ContentDelta, self._tail)
            self._trim("".join(self._lead or ()))
        self._trim(marker)
        self._phase, self._skip, self._begun = ReplyPhase.IN, self._markers.after_start, False
        self._tail, self._lead = "", None
        return True

    def _take_end(self, marker: str) -> bool:
        if self._phase is ReplyPhase.OPEN and (self._lead is None or self._answered) and not self._priming:
            return False
        if self._phase in (ReplyPhase.OUT, ReplyPhase.TOOL) and not self._unclosed:
            return False
        if self._phase is ReplyPhase.TOOL:
            if self._body is not None and self._body.inside_value:
                return False
            self._close_section("")
        self._unclosed = False
        if self._phase is ReplyPhase.IN and not self._keep_markers:
            self._text(ReasoningDelta, self._tail[: max(len(self._tail) - len(self._markers.before_end), 0)])
        self._trim(self._tail + "".join(self._lead or ()) + marker)
        self._phase, self._skip = ReplyPhase.OUT, self._markers.after_end
        self._tail, self._lead = "", self._new_lead()
        return True

    def _take_answer(self, role: enum.Enum) -> bool:
        """Drop a marker around the answer. Text that was held as its newlines goes with it."""
        if self._phase is ReplyPhase.IN:
            self._leave_thinking()
        if self._answer is None or (role is Role.ANSWER_START and self._lead is None and not self._priming):
            return False
        if role is Role.ANSWER_END and not self._answers:
            return False
        self._answers = role is Role.ANSWER_START
        self._answered = not self._priming
        self._skip = self._answer.after_start if self._answers else self._answer.after_end
        self._tail, self._lead = "", self._new_lead()
        return True

    def _leave_thinking(self) -> None:
        """End thinking that was not closed: something came that stands in no thinking. A late end marker is dropped."""
        self._phase, self._skip, self._unclosed = ReplyPhase.OUT, "", True
        self._tail, self._lead = "", self._new_lead()

    def _open_section(self, marker: str) -> None:
        """Begin a tool section. What was dropped before it comes back if the section holds no call."""
        if self._tools is None:
            raise RuntimeError("a tool marker matched without a tool format")
        self._opening = ("" if self._phase is ReplyPhase.IN else "".join(self._lead or ()) + self._tail) + marker
        self._unclosed = self._unclosed or self._phase is ReplyPhase.IN
        self._tail, self._lead, self._skip = "", None, ""
        self._explained = self._broken = False
        self._noise_len = 0
        self._body = self._tools.body(self._new_call)
        self._phase = ReplyPhase.TOOL

    def _close_section(self, marker: str, *, cut: bool = False) -> None:
        self._closer = []
        if self._body is not None:
            self._tool_events(self._body.cut() if cut else self._body.close())
        if self._noise:
            self._flush_noise(self._opening)
        if marker and self._broken and not self._explained:
            self._event(Malformed("tool_call", marker))
        self._body = None
        self._phase = ReplyPhase.OUT
        self._lead = self._new_lead()

    def _newlines_in_thinking(self) -> str:
        """Return what may be dropped from the end of thinking: what stands before its end marker, or before a call."""
        before_end, tools = self._markers.before_end, self._tools
        before_call = "" if tools is None or not self._markers.ended_by_tools else tools.before_start
        return max(before_end, before_call, key=len)

    # Station 3: sinks.

    def _sink(self, text: str) -> None:
        if self._skip:
            text = self._skip_newlines(text)
            if not text:
                return
        if self._body is not None:
            if not self._closer:
                if events := self._body.feed(text):
                    self._tool_events(events)
            elif text.isspace():
                self._closer.append(text)
            else:
                self._sink_pending()
                self._feed_body(text)
        elif self._phase is ReplyPhase.IN:
            self._begun = True
            self._text(ReasoningDelta, self._hold_tail(text, self._held_in))
        else:
            self._sink_content(text)

    def _skip_newlines(self, text: str) -> str:
        """Drop the part of `text` that agrees with what the template puts behind the last marker."""
        length = 0
        while length < min(len(text), len(self._skip)) and text[length] == self._skip[length]:
            length += 1
        self._trim(text[:length])
        self._skip = self._skip[length:] if length == len(text) else ""
        return text[length:]

    def _sink_content(self, text: str) -> None:
        if self._lead is not None:
            self._lead.append(text)
            if text.isspace():
                return
            text, self._lead = "".join(self._lead), None
        self._text(ContentDelta, self._hold_tail(text, self._trailing))

    def _hold_tail(self, text: str, newlines: str) -> str:
        """Keep back as many characters of `newlines` as end `text`; return the rest."""
        if not newlines or not (self._tail or text[-1:] in newlines):
            return text
        text, length = self._tail + text, 0
        while length < min(len(text), len(newlines)) and text[-1 - length] in newlines:
            length += 1
        cut = len(text) - length
        self._tail = text[cut:]
        return text[:cut]

    def _new_lead(self) -> list[str] | None:
        """Begin a stretch of content: whitespace at its start is held while it may stand before a marker."""
        marked = self._tools is not None or self._answer is not None
        if self._phase is ReplyPhase.OPEN or (self._phase is ReplyPhase.OUT and marked):
            return []
        return None

    def _tool_events(self, events: Iterable[ToolEvent]) -> None:
        for event in events:
            if type(event) is ToolArgs:
                self._event(event)
                continue
            if isinstance(event, Malformed) and self._opening:
                self._hold_noise(event.text)
                continue
            if isinstance(event, ToolStart):
                self._flush_noise("")
                self._explained = True
            self._event(event)

    def _hold_noise(self, text: str) -> None:
        self._broken = True
        self._noise.append(text)
        self._noise_len += len(text)
        if self._noise_len > MAX_NOISE:
            self._flush_noise(self._opening)

    def _flush_noise(self, opening: str) -> None:
        """Give out what stands in the section before any call, as content, and forget what opened the section."""
        self._opening = ""
        if self._noise:
            self._event(Malformed("tool_call", opening + "".join(self._noise)))
            self._noise.clear()

    def _trim(self, text: str) -> None:
        """Drop a marker or its newlines, unless reasoning is given out as written."""
        if self._keep_markers:
            self._text(ReasoningDelta, text)


def make_parser(
    spec: FormatSpec,
    tokenizer: Tokenizer | None = None,
    *,
    skip_special_tokens: bool = True,
    keep_markers: bool = False,
    make_id: Callable[[], str] = new_call_id,
) -> IncrementalParser:
    """Make the machine of a format: its own, or the one of its markers. Arguments as for `FormatParser`."""
    make = FormatParser if spec.machine is None else cast("type[FormatParser]", spec.machine)
    return make(
        spec,
        tokenizer,
        skip_special_tokens=skip_special_tokens,
        keep_markers=keep_markers,
        make_id=make_id,
    )


def parse_full(parser: IncrementalParser, token_ids: Sequence[int] = (), text: str | None = None) -> Folded:
    """Parse a whole reply: the only path that is not streaming, and the same one."""
    return fold([*parser.feed(token_ids, text), *parser.finish("stop")])
