r"""The output parser: one incremental machine that splits a reply into reasoning, content and tool calls.

It is fed tokens as they come, or text where there are no ids; a full reply is the fold of the same events
(`parse_full`), so what a client receives never depends on how the stream was cut. Text passes three stations: decoding
and markers, which `machine.py` describes, and

3. *Sinks*: by phase, to reasoning, content or the reader of a tool section. The newlines that the template puts around
   markers are dropped here: those behind a marker as they come, those before one by holding newlines back.

A marker inside a value is structural only where nothing but the next section, or the end of the output, follows it:
`{"city": "the tag </tool_call> ends a call"}` is one value, whether the marker is a token or spelled. A marker that a
model only names, in code, in quotation marks, or in thinking that goes on, is text: see `place.py` and `aside.py`. An
end of thinking that is quoted is one unless what quotes it is closed at once, or quotes the start marker, too.

Nothing is lost: every character goes to exactly one sink, or belongs to a marker and its newlines. Whitespace alone
before thinking, or before, between or after tool calls, is no content. All work is linear in the output.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import cast

from dovetail.contracts.output import (
    ContentDelta,
    FormatSpec,
    Markers,
    ReasoningDelta,
    State,
    ToolStart,
)
from dovetail.sdk.formats.aside import Aside
from dovetail.sdk.formats.detokenizer import TokenTables
from dovetail.sdk.formats.layout import ReplyPhase, Role, compile_layout
from dovetail.sdk.formats.machine import IncrementalParser, new_call_id
from dovetail.sdk.formats.place import SIGNS, STOPS, Place, ends_sentence
from dovetail.sdk.formats.plain import Plain
from dovetail.sdk.formats.reply import Folded, ToolCall, fold
from dovetail.sdk.formats.sections import CALLING, SectionParser

__all__ = ["Folded", "FormatParser", "ToolCall", "fold", "make_parser", "new_call_id", "parse_full"]

_OPEN_SIGNS = SIGNS + "".join(sorted(STOPS))
ENDING = frozenset([Role.END, Role.ANSWER_START, Role.ANSWER_END, Role.DROPPED])
"""Roles of markers that end thinking."""


@dataclass(slots=True)
class _QuotedEnd:
    """A marker that ends thinking unless the thinking only quotes it, which what follows says.

    Attributes:
        role: Of the marker.
        marker: Its text.
        closings: What closes what quotes it, one or the other.
        num_tokens: Tokens of the marker.
        num_thought: Tokens of thinking before it.
        text: What follows, as far as it may be one of `closings`.
    """

    role: enum.Enum
    marker: str
    closings: Sequence[str]
    num_tokens: int
    num_thought: int
    text: str = ""


class FormatParser(SectionParser):
    """The `OutputParser` of a `FormatSpec` without a machine of its own, for one choice."""

    def __init__(
        self,
        spec: FormatSpec,
        tokenizer: TokenTables | None = None,
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
            spec,
            compile_layout(spec, {} if tokenizer is None else tokenizer.added_tokens),
            tokenizer,
            phase=ReplyPhase.OUT if spec.reasoning is None else ReplyPhase(spec.initial.value),
            skip_special_tokens=skip_special_tokens,
            keep_markers=keep_markers,
            make_id=make_id,
        )
        self._spec = spec
        self._markers = spec.reasoning or Markers("", "")
        self._held_in = "" if keep_markers else self._newlines_in_thinking()
        self._answers = False
        self._trailing = (spec.tools.before_start if spec.tools else "") or (
            spec.answer.before_end if spec.answer else ""
        )
        self._skip = self._markers.after_start if self._phase is ReplyPhase.IN else ""
        self._begun = self._unclosed = False
        self._aside: Aside | None = None
        self._names_calls = spec.tools is not None or bool(self._markers.ended_by)

    _ends_sentence = False
    """Of an answer in which thinking may begin."""
    _named: tuple[int, bool, str] | None = None
    """Where thinking names the start marker: its passage, whether it is quoted, and what closes a mark before it."""
    _num_open = 0
    """How often it does so there, less the ends that it names behind."""
    _quoted_end: _QuotedEnd | None = None

    @property
    def pending_content(self) -> str:
        """Content that is held back only because it may turn out to be part of a marker or its newlines."""
        if self._lead is not None or self._phase not in (ReplyPhase.OPEN, ReplyPhase.OUT):
            return ""
        return self._tail + self._held

    def prime(self, prompt_tail: str) -> State:
        """Take what the template appended to the prompt, before anything is fed. Tool markers there mean nothing."""
        if self._markers.start:
            self._phase, self._skip = ReplyPhase.OPEN, ""
        self._lead = self._new_lead()
        self._prime(prompt_tail)
        self._tail, self._lead, self.place, self._named = "", self._new_lead(), Place(), None
        return State(self._phase.value)

    def _finish(self, *, cut: bool) -> None:
        if self._quoted_end is not None:
            self._end_quoted(self._quoted_end)
            self._push("")
            self._release()
        while self._phase is ReplyPhase.TOOL:
            self._close_section("".join(self._closer[:1]), cut=cut and not self._closer, is_last=True)
            if self._unread:
                self._push("")
                self._release()
        while self._aside is not None:
            self._end_aside("length" if cut else "stop")
            if self._unread:
                self._push("")
                self._release()
        if self._phase is ReplyPhase.IN:
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
            holds = "" if self._explained or self._in_doubt else SIGNS
            if self._closer or (holds and not (self._blank is None and self.place.is_settled)):
                return None
            return self._passing_table(holds)
        if self._lead is not None or self._tail or (self._phase is ReplyPhase.IN and not self._begun):
            return None
        is_open = self._phase is ReplyPhase.OPEN
        if self._phase is ReplyPhase.OUT and not self._names_calls:
            return self._passing_table(self._trailing)
        if self._aside is not None or self._quoted_end is not None or not self.place.is_settled:
            return None
        if is_open and self._ends_sentence:
            return None
        held = self._held_in if self._phase is ReplyPhase.IN else self._trailing
        return self._passing_table(held + (_OPEN_SIGNS if is_open else SIGNS))

    # What markers do.

    def _take(self, role: enum.Enum, marker: str) -> bool:
        """Act on a marker. False: it is literal text here."""
        if self._quoted_end is not None:
            self._end_quoted(self._quoted_end)
            self._unread += marker
            return True
        if self._phase is ReplyPhase.CLOSED or (self._phase is ReplyPhase.ASIDE and role is not Role.END):
            self._end_aside(None)
            if self._unread:
                self._push("")
                self._release()
        if role in CALLING and not (self._priming or (self._phase is ReplyPhase.TOOL and self._explained)):
            if self._is_named(role, marker):
                return False
            if self._phase is ReplyPhase.IN:
                return self._begin_aside(marker)
        if self._phase is ReplyPhase.IN and role in ENDING and (quoted := self._quotes_end(role, marker)) is not None:
            return quoted
        if role is Role.START:
            return self._take_start(marker)
        if role is Role.END:
            return self._take_end(marker)
        if role is Role.ANSWER_END and not self._answers and marker == self._markers.end:
            return self._take_end(marker)
        if role in (Role.ANSWER_START, Role.ANSWER_END):
            return self._take_answer(role)
        if role is Role.BREAK:
            return False
        if role is Role.DROPPED:
            if self._phase is ReplyPhase.IN:
                self._leave_thinking()
            self._skip = ""
            return True
        if self._priming:
            return False
        if self._phase is ReplyPhase.TOOL:
            begins_next = role is Role.TOOL_START and (self._closer or self._in_doubt)
            if self._body is not None and self._body.inside_value and not begins_next:
                self._take_inside_value(role, marker)
                return True
            self._close_section(marker if role is Role.TOOL_END else "")
            if self._unread:  # a section in doubt was none, so that this marker stands in text
                self._push("")
                self._release()
                return self._take(role, marker) if role is Role.TOOL_START else False
            if role is Role.TOOL_START and self.place.is_quoted:  # behind the calls stands text that names it
                self.place.hold_call()
                return False
        if role is Role.TOOL_START:
            self._open_section(marker)
        elif role in (Role.TOOL_TEXT, Role.TOOL_BARE):
            self._open_section("", in_doubt=self._tools is not None and marker in self._tools.also)
            self._sink(marker)
        return True

    def _quotes_end(self, role: enum.Enum, marker: str) -> bool | None:
        """Whether what follows says what an end is that thinking quotes (False: it is text); None: thinking ends."""
        if self._priming or self._markers.ends_quoted:
            return None
        is_quoted, (passage, names_quoted, partners) = self.place.is_quoted, self._named or (-1, False, "")
        is_same = passage == self.place.passage
        # One that begins a line needs a start of its own: else code that was left open would keep the answer.
        if is_quoted and is_same and names_quoted and (self._num_open > 0 or not self.place.is_blank):
            self._num_open -= 1
            return False
        closings = self.place.closings if is_quoted else partners if is_same else ""
        if not closings:
            return None
        self._end_run()
        num_tokens = len(self._starts)
        if self._views is self._by_ids:
            num_tokens += marker in self._layout.marker_text.values()
        self._quoted_end = _QuotedEnd(role, marker, closings, num_tokens, self.reasoning_tokens)
        return True

    def _sink_quoted(self, text: str, end: _QuotedEnd) -> None:
        """Take what stands behind an end that is quoted: it is text if what quotes it is closed at once."""
        end.text += text
        if any(end.text.startswith(closing) for closing in end.closings):
            self._quoted_end = None
            self.reasoning_tokens += end.num_tokens
            self._sink(end.marker + end.text)
        elif not any(closing.startswith(end.text) for closing in end.closings):
            self._end_quoted(end)

    def _end_quoted(self, end: _QuotedEnd) -> None:
        """Thinking ended there, and what came since is read as the answer."""
        self._quoted_end, self._named, self.place = None, None, Place()
        self.reasoning_tokens = end.num_thought
        self._take(end.role, end.marker)
        self._unread = end.text

    def _begin_aside(self, marker: str) -> bool:
        """Hold what looks like a call within thinking."""
        self._end_run()
        reader = None
        if self._tools is not None:
            spec = replace(self._spec, reasoning=None, initial=State.OUT)
            reader = FormatParser(spec, make_id=self._make_id)
            reader._num_calls, reader.patience = self._num_calls, self.patience
            reader.place = copy(self.place)
        self._phase, self._aside, self._num_thought = ReplyPhase.ASIDE, Aside(marker, reader), self.reasoning_tokens
        return True

    _num_thought = 0
    """Tokens of thinking before what is held of it."""

    def _end_aside(self, reason: str | None) -> None:
        """Say what was held of thinking: calls if the reply is over, for a `reason`, and was to begin with them."""
        aside, self._aside = self._aside, None
        if aside is None:
            return
        events = None if reason is None else aside.calls(reason)
        self._phase = ReplyPhase.IN
        if events is not None:
            self.reasoning_tokens = self._num_thought
            self._text(ReasoningDelta, self._tail if self._tools is None else "")
            self._leave_thinking()
            for event in events:
                self._event(event)
            self._num_calls += sum(isinstance(event, ToolStart) for event in events)
        elif reason is not None and aside.is_none:
            self._read_on(aside)
        else:
            self._sink(aside.text)
            if aside.end:
                end = aside.end.rstrip()
                self._take_end(end)
                self._unread = aside.end[len(end) :]

    def _read_on(self, aside: Aside) -> None:
        """What was held is thinking: its marker is text, and what follows it is read as thinking."""
        self._phase, self._aside = ReplyPhase.IN, None
        self.patience = aside.patience
        self._sink(aside.marker)
        self._unread = aside.text[len(aside.marker) :] + aside.end

    def _sink_aside(self, text: str, aside: Aside) -> None:
        """Hold more; what is certainly thinking is read on as such."""
        if self._phase is ReplyPhase.CLOSED:
            if text.isspace():
                aside.end += text
            else:
                self._end_aside(None)
                self._unread += text
            return
        aside.feed(text)
        if aside.is_none:
            self._read_on(aside)

    def _take_start(self, marker: str) -> bool:
        if self._phase is ReplyPhase.IN and self._begun:
            is_quoted, passage = self.place.is_quoted, self.place.passage
            is_same = self._named is not None and self._named[0] == passage
            self._num_open = 1 + (max(self._num_open, 0) if is_same else 0)
            self._named = passage, is_quoted, self.place.partners
            return False
        if self._phase is ReplyPhase.OPEN:
            if not (self._lead is not None or self._priming or self.place.may_think(self._ends_sentence)):
                if self.place.is_quoted:
                    self.place.hold_call()
                return False
            self._text(ContentDelta, self._tail)
            self._trim("".join(self._lead or ()))
        self._trim(marker)
        self._phase, self._skip, self._begun = ReplyPhase.IN, self._markers.after_start, False
        self._tail, self._lead = "", None
        self.place, self._named = Place(), None
        return True

    def _take_end(self, marker: str) -> bool:
        if self._phase is ReplyPhase.ASIDE and self._aside is not None:
            self._phase, self._aside.end = ReplyPhase.CLOSED, marker
            return True
        if self._phase is ReplyPhase.OPEN and self._lead is None and not self._priming:
            return False
        if self._phase is ReplyPhase.OUT and not self._unclosed:
            return False
        self._unclosed = False
        if self._phase is ReplyPhase.IN and not self._keep_markers:
            self._text(ReasoningDelta, self._tail[: max(len(self._tail) - len(self._markers.before_end), 0)])
        self._trim(self._tail + "".join(self._lead or ()) + marker)
        self._phase, self._skip = ReplyPhase.OUT, self._markers.after_end
        self._tail, self._lead = "", self._new_lead()
        self.place = Place()
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
        if not self._priming:
            self._phase = ReplyPhase.OUT
        self._skip = self._answer.after_start if self._answers else self._answer.after_end
        self._tail, self._lead = "", self._new_lead()
        self.place = Place()
        return True

    def _leave_thinking(self) -> None:
        """End thinking that was not closed: something came that stands in no thinking. A late end marker is dropped."""
        self._phase, self._skip, self._unclosed = ReplyPhase.OUT, "", True
        self._tail, self._lead = "", self._new_lead()

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
            if not (self._explained or self._in_doubt):
                self.place.feed(text)
                if self._blank is not None and text.isspace():
                    self._blank.append(text)
                else:
                    self._blank = None
            if not self._closer:
                if events := self._body.feed(text):
                    self._tool_events(events)
                if self._in_doubt is not None and self._body.left is not None:
                    self._end_doubt(self._body.left)
            elif text.isspace():
                self._closer.append(text)
            else:
                self._sink_pending()
                self._feed_body(text)
        elif self._aside is not None:
            self._sink_aside(text, self._aside)
        elif self._quoted_end is not None:
            self._sink_quoted(text, self._quoted_end)
        elif self._phase is ReplyPhase.IN:
            self._begun = True
            self.place.feed(text)
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
        if self._phase is ReplyPhase.OPEN:
            if self._ends_sentence or not STOPS.isdisjoint(text):
                self._ends_sentence = ends_sentence(text, self._ends_sentence)
            self.place.feed(text)
        elif self._names_calls:
            self.place.feed(text)
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

    def _trim(self, text: str) -> None:
        """Drop a marker or its newlines, unless reasoning is given out as written."""
        if self._keep_markers:
            self._text(ReasoningDelta, text)


def make_parser(
    spec: FormatSpec,
    tokenizer: TokenTables | None = None,
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
