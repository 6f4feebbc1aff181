r"""The output parser: one incremental machine that splits a reply into reasoning, content and tool calls.

It is fed tokens as they come, or text where there are no ids; a full reply is the fold of the same events
(`parse_full`), so what a client receives never depends on how the stream was cut. Text passes three stations:

1. *Decoding*: tokens to text; a character whose bytes are split comes with its last byte.
2. *Markers*: a marker that is a token matches by its id; another by an automaton over the text, which holds back the
   longest end of the text that may still become one. Which markers count depends on the phase (see `layout.py`).
3. *Sinks*: by phase, to reasoning, content or the reader of a tool section. The newlines that the template puts around
   markers are dropped here: those behind a marker as they come, those before one by holding newlines back.

Nothing is lost: every character goes to exactly one sink, or belongs to a marker and its newlines. Whitespace alone
before thinking, or before, between or after tool calls, is no content. All work is linear in the output.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from dovetail.contracts.reasoning import ContentDelta, Event, FormatSpec, Markers, ReasoningDelta, State
from dovetail.contracts.tools import Malformed, ToolBody, ToolEvent, ToolStart
from dovetail.text.detokenizer import Detokenizer
from dovetail.text.layout import Phase, Role, View, compile_layout
from dovetail.text.reply import Folded, ToolCall, fold
from dovetail.text.tokenizer import Tokenizer

__all__ = ["Folded", "FormatParser", "ToolCall", "fold", "new_call_id", "parse_full"]


def new_call_id() -> str:
    """Return a fresh tool call id."""
    return f"call_{secrets.token_hex(12)}"


class FormatParser:
    """The `OutputParser` of a `FormatSpec`, for one choice.

    Attributes:
        reasoning_tokens: Tokens generated inside thinking so far, markers excluded. A token belongs where its first
            character does. Text without ids counts none.
        num_chars: Characters of the tokens fed so far, markers that are tokens not included.
        marker_ids: Ids of the format's markers that are tokens.
    """

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
        self.reasoning_tokens = 0
        self.num_chars = 0
        self._layout = compile_layout(spec, {} if tokenizer is None else tokenizer.added_tokens)
        self.marker_ids = self._layout.marker_ids
        self._decoder = None
        if tokenizer is not None:
            self._decoder = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, keep=self.marker_ids)
        self._markers = spec.reasoning or Markers("", "")
        self._tools = spec.tools
        self._keep_markers = keep_markers
        self._make_id = make_id
        self._num_calls = 0
        self._priming = False
        self._phase = Phase.OUT if spec.reasoning is None else Phase(spec.initial.value)
        self._views = self._layout.by_ids
        # Station 2: text that may become a marker, and the offsets in the output where tokens start that are not
        # attributed yet.
        self._held = ""
        self._state = 0
        self._seen = 0
        self._starts: deque[int] = deque()
        # Station 3.
        self._skip = self._markers.after_start if self._phase is Phase.IN else ""
        self._begun = False
        self._tail = ""
        self._lead: list[str] | None = self._new_lead()
        self._body: ToolBody | None = None
        self._opening = ""
        self._explained = False
        self._broken = False
        # Output.
        self._events: list[Event] = []
        self._run_kind: type[ReasoningDelta] | type[ContentDelta] = ContentDelta
        self._run: list[str] = []
        self._reported = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as known."""
        return self._phase is Phase.IN

    @property
    def pending_content(self) -> str:
        """Content that is held back only because it may turn out to be part of a marker or its newlines."""
        if self._lead is not None or self._phase in (Phase.IN, Phase.TOOL):
            return ""
        return self._tail + self._held

    def prime(self, prompt_tail: str) -> State:
        """Take what the template appended to the prompt, before anything is fed. Tool markers there mean nothing."""
        if self._markers.start:
            self._phase, self._skip = Phase.OPEN, ""
        self._lead = self._new_lead()
        self._priming = True
        self._views = self._layout.by_text
        self._push(prompt_tail)
        self._priming = False
        self._held, self._state, self._tail, self._lead = "", 0, "", self._new_lead()
        self._drain()
        return State(self._phase.value)

    def feed(self, token_ids: Sequence[int], text: str | None = None) -> list[Event]:
        """Take new tokens, or text if there are no ids."""
        if text is not None and not token_ids:
            self._use(self._layout.by_text)
            self._push(text)
            return self._drain()
        self._use(self._layout.by_ids)
        decoder = self._decoder
        if decoder is None:
            raise ValueError("a parser without a tokenizer takes text, not token ids")
        for token_id in token_ids:
            view = self._views[self._phase]
            role = view.ids.get(token_id)
            if role is not None and self._take_token(role, token_id, decoder):
                continue
            piece = decoder.push(token_id)
            self.num_chars += len(piece)
            if view.matcher is None:
                if self._phase is Phase.IN:
                    self.reasoning_tokens += 1
                if piece:
                    self._sink(piece)
            else:
                self._starts.append(self._seen)
                self._push(piece)
        return self._drain()

    def finish(self, reason: str) -> list[Event]:
        """Give out what was held back; `reason` is not needed by this machine."""
        if self._decoder is not None and (rest := self._decoder.flush()):
            self._push(rest)
        self._release()
        while self._starts:
            self._starts.popleft()
            self.reasoning_tokens += self._phase is Phase.IN
        if self._phase is Phase.TOOL:
            self._close_section("")
        elif self._phase is Phase.IN:
            self._text(ReasoningDelta, self._tail)
        else:
            if self._lead and not self._num_calls:
                self._text(ContentDelta, "".join(self._lead))
            self._text(ContentDelta, self._tail)
        self._tail, self._lead = "", None
        return self._drain()

    # Station 2: markers.

    def _use(self, views: object) -> None:
        if views is not self._views:
            self._release()
            self._views = self._layout.by_ids if views is self._layout.by_ids else self._layout.by_text

    def _take_token(self, role: Role, token_id: int, decoder: Detokenizer) -> bool:
        """Take a marker token. False: it is literal here."""
        if rest := decoder.flush():
            self._push(rest)
        self._release()
        return self._take(role, self._layout.marker_text[token_id], spelled=False)

    def _push(self, text: str) -> None:
        """Take text; find the markers in it that are matched in the text."""
        buffer = self._held + text
        begin, scanned, state = 0, len(self._held), self._state
        self._seen += len(text)
        base = self._seen - len(buffer)
        while True:
            view = self._views[self._phase]
            if view.matcher is None:
                self._held, self._state = "", 0
                self._give(buffer[begin:], self._seen + 1)
                return
            end, state, length = view.matcher.scan(buffer, scanned, state)
            cut = end - (length or view.matcher.held(state))
            self._give(buffer[begin:cut], base + cut)
            if not length:
                self._held, self._state = buffer[cut:], state
                return
            self._take_spelled(view, buffer[cut:end], base + end)
            begin = scanned = end

    def _take_spelled(self, view: View, marker: str, end: int) -> None:
        """Take a marker found in the text, which ends at offset `end`, or give it out as text."""
        if self._take(view.roles[marker], marker, spelled=True):
            while self._starts and self._starts[0] < end:
                self._starts.popleft()
        else:
            self._give(marker, end)

    def _release(self) -> None:
        """Give out text that was held back for a marker that did not come."""
        held, self._held, self._state = self._held, "", 0
        self._give(held, self._seen)

    def _give(self, text: str, end: int) -> None:
        """Give text up to offset `end` of the output to the phase's sink, and attribute its tokens."""
        while self._starts and self._starts[0] < end:
            self._starts.popleft()
            self.reasoning_tokens += self._phase is Phase.IN
        if text:
            self._sink(text)

    # What markers do.

    def _take(self, role: Role, marker: str, *, spelled: bool) -> bool:
        """Act on a marker. False: it is literal text here."""
        if role is Role.START:
            return self._take_start(marker)
        if role is Role.END:
            return self._take_end(marker)
        if self._priming or (spelled and self._body is not None and self._body.inside_value):
            return False
        if self._phase is Phase.TOOL:
            self._close_section(marker if role is Role.TOOL_END else "")
        if role is Role.TOOL_START:
            self._open_section(marker)
        return True

    def _take_start(self, marker: str) -> bool:
        if self._phase is Phase.IN and self._begun:
            return False
        if self._phase is Phase.OPEN:
            self._text(ContentDelta, self._tail)
            self._trim("".join(self._lead or ()))
        self._trim(marker)
        self._phase, self._skip, self._begun = Phase.IN, self._markers.after_start, False
        self._tail, self._lead = "", None
        return True

    def _take_end(self, marker: str) -> bool:
        if self._phase is Phase.OPEN and self._lead is None and not self._priming:
            return False
        self._trim(self._tail + "".join(self._lead or ()) + marker)
        self._phase, self._skip = Phase.OUT, self._markers.after_end
        self._tail, self._lead = "", self._new_lead()
        return True

    def _open_section(self, marker: str) -> None:
        """Begin a tool section. What was dropped before it comes back if the section holds no call."""
        if self._tools is None:
            raise RuntimeError("a tool marker matched without a tool format")
        self._opening = ("" if self._phase is Phase.IN else "".join(self._lead or ()) + self._tail) + marker
        self._tail, self._lead, self._skip = "", None, ""
        self._explained = self._broken = False
        self._body = self._tools.body(self._new_call)
        self._phase = Phase.TOOL

    def _close_section(self, marker: str) -> None:
        if self._body is not None:
            self._tool_events(self._body.close())
        if marker and self._broken and not self._explained:
            self._event(Malformed("tool_call", marker))
        self._body = None
        self._phase = Phase.OUT
        self._lead = self._new_lead()

    def _new_call(self, name: str, call_id: str | None = None) -> ToolStart:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return ToolStart(index, call_id or self._make_id(), name)

    # Station 3: sinks.

    def _sink(self, text: str) -> None:
        if self._skip:
            text = self._skip_newlines(text)
            if not text:
                return
        if self._phase is Phase.IN:
            self._begun = True
            self._text(ReasoningDelta, self._hold_tail(text, "" if self._keep_markers else self._markers.before_end))
        elif self._body is not None:
            self._tool_events(self._body.feed(text))
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
        self._text(ContentDelta, self._hold_tail(text, self._tools.before_start if self._tools else ""))

    def _hold_tail(self, text: str, newlines: str) -> str:
        """Keep back as many characters of `newlines` as end `text`; return the rest."""
        if not newlines:
            return text
        text, length = self._tail + text, 0
        while length < min(len(text), len(newlines)) and text[-1 - length] in newlines:
            length += 1
        cut = len(text) - length
        self._tail = text[cut:]
        return text[:cut]

    def _new_lead(self) -> list[str] | None:
        """Begin a stretch of content: whitespace at its start is held while it may stand before a marker."""
        if self._phase is Phase.OPEN or (self._phase is Phase.OUT and self._tools is not None):
            return []
        return None

    def _tool_events(self, events: Iterable[ToolEvent]) -> None:
        for event in events:
            if isinstance(event, ToolStart):
                self._explained, self._opening = True, ""
            elif isinstance(event, Malformed) and self._opening:
                self._broken, event, self._opening = True, Malformed(event.kind, self._opening + event.text), ""
            self._event(event)

    def _trim(self, text: str) -> None:
        """Drop a marker or its newlines, unless reasoning is given out as written."""
        if self._keep_markers:
            self._text(ReasoningDelta, text)

    # Events, adjacent text of one kind as one.

    def _text(self, kind: type[ReasoningDelta] | type[ContentDelta], text: str) -> None:
        if not text:
            return
        if kind is not self._run_kind:
            self._end_run()
            self._run_kind = kind
        self._run.append(text)

    def _event(self, event: Event) -> None:
        self._end_run()
        self._events.append(event)

    def _end_run(self) -> None:
        if not self._run:
            return
        text = "".join(self._run)
        self._run.clear()
        if self._run_kind is ContentDelta:
            self._events.append(ContentDelta(text))
        else:
            self._events.append(ReasoningDelta(text, self.reasoning_tokens - self._reported))
            self._reported = self.reasoning_tokens

    def _drain(self) -> list[Event]:
        self._end_run()
        events, self._events = self._events, []
        return [] if self._priming else events


def parse_full(parser: FormatParser, token_ids: Sequence[int] = (), text: str | None = None) -> Folded:
    """Parse a whole reply: the only path that is not streaming, and the same one."""
    return fold([*parser.feed(token_ids, text), *parser.finish("stop")])
