r"""Replies in regions that regular expressions open and close: a checkpoint's `response_template` with patterns.

```json
"tool_calls": {"open_pattern": "<call=(?P<name>\\w+)>", "close": "</call>", "repeats": true, "content": "json",
               "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}
```

Between regions stands the field that nothing opens, or the answer. Inside one only what closes it counts, and inside
thinking what opens a call. What would open one is text where it is quoted, or in code. The output is looked at
character by character where a match may begin, so that the result does not depend on how it was cut; matching has a
bounded time, and where an expression takes longer the rest of the reply is text, which the log says once.

Defined by the documentation of transformers' chat response parsing (`response_template`, version 1).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, cast

import regex

from dovetail.contracts.output import (
    ContentDelta,
    Event,
    FormatSpec,
    Malformed,
    NewCall,
    ReasoningDelta,
    State,
    ToolBody,
    ToolEvent,
    ToolFormat,
    ToolStart,
)
from dovetail.sdk.formats.detokenizer import Detokenizer, TokenTables
from dovetail.sdk.formats.layout import ReplyPhase, make_layout
from dovetail.sdk.formats.machine import IncrementalParser, new_call_id
from dovetail.sdk.formats.place import Place
from dovetail.sdk.formats.stop_regex import Credit, TooSlowError

logger = logging.getLogger("dovetail.text")
MAX_HELD = 1024
"""Characters in which a match is looked for; a longer one is not found."""
SLICE = 256
"""Characters that are looked at in one go."""
EARN_S = 0.00005
"""What every character that is looked at alone adds to the credit of the expressions."""
MAX_COMPLAINTS = 100
_COMPLAINTS: set[str] = set()
_LOOKS_AROUND = regex.compile(r"\(\?<?[=!]|\\[bBAzZ]|[$^]|\(\?\(|\\K")

Part = Literal["thinking", "content", "tool_calls"]
MakeBody = Callable[[NewCall, Sequence[Mapping[str, object]], Mapping[str, str]], ToolBody]
"""Makes the reader of a call's region; called with the tools and what the opening match captured."""


@dataclass(frozen=True, slots=True)
class RegionBoundary:
    """What opens or closes a region. `is_fixed`: literals, of which none begins another; a match cannot grow."""

    pattern: regex.Pattern[str]
    is_fixed: bool


@dataclass(frozen=True, slots=True)
class Region:
    """A field of a response template; `open` is None for what stands between the others."""

    part: Part
    open: RegionBoundary | None
    close: RegionBoundary | None
    strips: bool = True
    body: MakeBody | None = None


@dataclass(frozen=True, slots=True)
class Regions:
    """A response template: its fields, and what stands before a reply."""

    fields: tuple[Region, ...]
    anchor: regex.Pattern[str] | None = None

    def has(self, part: Part) -> bool:
        """Whether there is a region of this kind."""
        return any(field.part == part for field in self.fields)

    def spec(self, tools: Sequence[Mapping[str, object]] = ()) -> FormatSpec:
        """Return the format of a request."""
        calls = ToolFormat("", "", body=OfferedTools(tools)) if tools and self.has("tool_calls") else None
        return FormatSpec(machine=partial(RegionParser, self), tools=calls)


@lru_cache(maxsize=16)
def _beginnings(regions: Regions) -> Callable[[str, int], regex.Match[str] | None] | None:
    """Return what finds a character with which an edge may begin; None where an expression looks beyond its match."""
    edges = [edge for field in regions.fields for edge in (field.open, field.close) if edge is not None]
    if any(_LOOKS_AROUND.search(edge.pattern.pattern) for edge in edges):
        return None
    first = "".join(char for char in map(chr, range(128)) if any(_may_begin(edge, char) for edge in edges))
    others = "" if all(edge.is_fixed and edge.pattern.pattern.isascii() for edge in edges) else r"\x80-\U0010ffff"
    return cast(
        "Callable[[str, int], regex.Match[str] | None]", regex.compile(f"[{regex.escape(first)}{others}]").search
    )


def _may_begin(edge: RegionBoundary, char: str) -> bool:
    try:
        return edge.pattern.match(char, partial=True, timeout=0.01) is not None
    except TimeoutError:
        return True


@dataclass(frozen=True)
class OfferedTools:
    """The `ToolFormat.body` beside `RegionParser`, which reads calls itself and asks for the tools alone."""

    tools: Sequence[Mapping[str, object]]

    def __call__(self, new_call: NewCall) -> ToolBody:
        """Regions have no reader of their own."""
        raise TypeError("calls in regions are read by their machine")


class _NoPlainTokens(dict[int, str]):
    """Every token is looked at."""

    def __missing__(self, token_id: int) -> str:
        return ""


class RegionParser(IncrementalParser):
    """The `OutputParser` of regions. Phases: IN in thinking, TOOL in a call, else OUT."""

    def __init__(
        self,
        regions: Regions,
        spec: FormatSpec,
        tokenizer: TokenTables | None = None,
        *,
        skip_special_tokens: bool = True,
        keep_markers: bool = False,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        """Prepare; arguments as for `FormatParser`. Special tokens give their text: patterns may name them."""
        kept = frozenset() if tokenizer is None else frozenset(tokenizer.special_ids)
        layout = make_layout({phase: {} for phase in ReplyPhase}, (), kept)
        super().__init__(layout, tokenizer, phase=ReplyPhase.OUT, keep_markers=keep_markers, make_id=make_id)
        self._plain = dict.fromkeys(self._plain, _NoPlainTokens())  # type: ignore[arg-type]
        body = None if spec.tools is None else spec.tools.body
        self._tools = body.tools if isinstance(body, OfferedTools) else None
        self._anchor = regions.anchor
        self._fields = [field for field in regions.fields if field.part != "tool_calls" or self._tools is not None]
        self._implicit = next((f for f in self._fields if f.open is None), Region("content", None, None))
        self._begins = _beginnings(regions)
        self._credit = Credit()
        self._is_given_up = self._is_reported = False
        self._body: ToolBody | None = None
        self._opening = ""
        self._is_explained = False
        self._enter(self._implicit)

    @property
    def pending_content(self) -> str:
        """Content that is held back only because it may turn out to be part of a marker, or space before one."""
        return self._tail + self._held if self._phase is ReplyPhase.OUT else ""

    def prime(self, prompt_tail: str) -> State:
        """Take what the template appended, from the reply's beginning on."""
        try:
            found = None if self._anchor is None else self._credit.search(self._anchor, prompt_tail)
        except TooSlowError:
            found = None
        while found is not None and found.end() < len(prompt_tail):
            prompt_tail = prompt_tail[found.end() :]
            found = self._anchor.search(prompt_tail, timeout=1.0) if self._anchor is not None else None
        self._priming = True
        self._push("" if found is not None else prompt_tail)
        self._finish_looking()
        self._drain()
        self._priming = False
        self._tail, self._num_calls, self._is_reported = "", 0, False
        if self._phase is ReplyPhase.TOOL:
            self._enter(self._implicit)
        return State.IN if self._phase is ReplyPhase.IN else State.OUT

    def finish(self, reason: str) -> list[Event]:
        """Give out what was held back; what may have grown is what it is."""
        if self._decoder is not None and (rest := self._decoder.flush()):
            self._push(rest)
        self._finish_looking()
        return super().finish(reason)

    def _finish_looking(self) -> None:
        """Take what is held for what it is: nothing follows."""
        try:
            while self._held and not self._is_given_up and self._step(is_over=True):
                pass
        except TooSlowError:
            self._give(self._give_up(), self._seen)

    def _finish(self, *, cut: bool) -> None:
        if self._phase is ReplyPhase.TOOL:
            self._end_call("", cut=cut)
        elif not self._at_start:
            self._text(self._kind, self._tail)
        self._tail = ""

    # Stations 1 and 2.

    def _token(self, token_id: int, decoder: Detokenizer) -> None:
        piece = decoder.push(token_id)
        self.num_chars += len(piece)
        self._starts.append(self._seen)
        self._push(piece)

    def _push(self, text: str) -> None:
        self._seen += len(text)
        behind = self._seen - len(text)
        for begin in range(0, len(text), SLICE):
            piece = text[begin : begin + SLICE]
            behind += len(piece)
            self._credit.earn()
            if not self._is_given_up:
                try:
                    self._scan(piece, behind)
                    continue
                except TooSlowError:
                    piece = self._give_up()
            self._give(piece, behind)

    def _give_up(self) -> str:
        """Take the rest of the reply as text; return what of it was not given out."""
        _complain("response_template of tokenizer_config.json: patterns take too long; the rest of the reply is text")
        self._is_given_up = True
        text, self._held, self._left = self._held + self._left, "", ""
        return text

    def _scan(self, text: str, end: int) -> None:
        """Look for edges in more text, which ends at offset `end` of the output."""
        pos = 0
        while pos < len(text):
            self._left = text[pos:]
            if self._begins is not None and not self._held:
                found = self._begins(text, pos)
                begin, pos = pos, len(text) if found is None else found.start()
                self._give(text[begin:pos], end - len(text) + pos)
                if found is None:
                    break
            self._credit.earn(EARN_S)
            self._held, self._left = self._held + text[pos], text[pos + 1 :]
            pos += 1
            self._end = end - len(text) + pos
            while self._step(is_over=False):
                pass
        self._left = ""

    _left = ""
    """Text of this slice that was not looked at yet."""
    _end = 0
    """Offset in the output at which what is held ends."""

    def _step(self, *, is_over: bool) -> bool:
        """Act on the first edge in what is held, or give out what certainly is none; False: nothing more is certain."""
        held, waiting = self._held, len(self._held)
        best: tuple[tuple[int, int], Region | None, regex.Match[str]] | None = None
        matches = self._credit.search_all([edge.pattern for _, edge in self._watched], held, partial=not is_over)
        for (region, edge), match in zip(self._watched, matches, strict=True):
            if match is None or (match.start() == match.end() and match.start() == len(held)):
                continue
            if not is_over and (match.partial or (match.end() == len(held) and not edge.is_fixed)):
                waiting = min(waiting, match.start())
            elif best is None or (match.start(), -match.end()) < best[0]:
                best = (match.start(), -match.end()), region, match
        if best is not None and best[2].start() < waiting:
            _, region, match = best
            self._release_to(match.start())
            self._held = self._held[len(match.group()) :]
            self._act(region, match)
            return bool(self._held)
        self._release_to(max(waiting, len(held) - MAX_HELD))
        return False

    def _release_to(self, size: int) -> None:
        """Give out the first characters of what is held."""
        text, self._held = self._held[:size], self._held[size:]
        self._give(text, self._end - len(self._held))

    def _act(self, region: Region | None, match: regex.Match[str]) -> None:
        """Leave or enter a region; a match inside a string of a call's arguments is part of it."""
        while self._starts and self._starts[0] < self._end - len(self._held):
            self._starts.popleft()
        marker = match.group()
        if region is None:
            if self._body is not None and self._body.inside_value:
                self._sink(marker)
                return
            self._leave(marker)
            self._enter(self._implicit)
            return
        if self._is_named(marker):
            self._sink(marker)
            return
        self._leave("")
        self._enter(region)
        if region.part == "thinking":
            self._trim(marker)
        elif region.part == "tool_calls" and region.body is not None:
            captured = {name: text for name, text in match.groupdict().items() if text is not None}
            self._opening, self._is_explained = marker, False
            self._body = region.body(self._new_call, self._tools or (), captured)

    def _is_named(self, marker: str) -> bool:
        """Whether what would open a region is only quoted, or stands in code; blanks before it may be part of it."""
        place = copy(self.place)
        if lead := marker[: len(marker) - len(marker.lstrip())]:
            place.feed(lead)
        if self._has_said and place.is_quoted:
            self.place.hold_call()
            return True
        return False

    # Station 3.

    def _enter(self, region: Region) -> None:
        phases = {"thinking": ReplyPhase.IN, "tool_calls": ReplyPhase.TOOL, "content": ReplyPhase.OUT}
        self._region, self._phase = region, phases[region.part]
        self._at_start = region.strips
        self._watched = [*self._edges(region)]
        self._tail = self._lead = ""
        self._has_said, self.place = False, Place(behind_call=self._num_calls > 0)

    def _edges(self, here: Region) -> Iterator[tuple[Region | None, RegionBoundary]]:
        """Yield what counts in a region: what opens others, and None with what closes it."""
        if here.close is not None:
            yield None, here.close
        for field in self._fields:
            is_open = here.open is None or (here.part == "thinking" and field.part == "tool_calls")
            if field.open is not None and is_open:
                yield field, field.open

    def _leave(self, marker: str) -> None:
        if self._phase is ReplyPhase.TOOL:
            self._end_call(marker, cut=False)
        elif self._region.part == "thinking":
            self._trim(self._tail + marker)
        elif not self._region.strips:
            self._text(self._kind, self._tail)

    def _end_call(self, marker: str, *, cut: bool) -> None:
        if self._body is None or self._priming:
            self._body = None
            return
        self._tool_events(self._body.cut() if cut else self._body.close())
        self._body = None
        if marker and not (self._is_explained or self._opening):
            self._event(Malformed("tool_call", marker))

    def _tool_events(self, events: Sequence[ToolEvent]) -> None:
        """Give out what a call's reader says; text of a region without a call comes with the markers around it."""
        for event in events:
            if isinstance(event, ToolStart):
                self._is_explained = True
            if isinstance(event, Malformed) and not self._is_explained and self._opening:
                self._event(Malformed(event.kind, self._opening))
                self._opening = ""
            self._event(event)

    @property
    def _kind(self) -> type[ReasoningDelta] | type[ContentDelta]:
        return ReasoningDelta if self._phase is ReplyPhase.IN else ContentDelta

    def _take(self, role: enum.Enum, marker: str) -> bool:
        """There are no other markers."""
        return False

    def _sink(self, text: str) -> None:
        if self._body is not None:
            self._tool_events(self._body.feed(text))
            return
        self.place.feed(text)
        self._has_said = self._has_said or not text.isspace()
        if self._keep_markers and self._phase is ReplyPhase.IN:
            self._text(ReasoningDelta, text)
            return
        if self._at_start:
            text = self._lead + text
            inner = text.lstrip()
            self._lead = text[: len(text) - len(inner)]
            if not inner:
                return
            # Space before an answer is none of it, but between two parts of one.
            text = text if self._is_reported and self._phase is ReplyPhase.OUT else inner
            self._at_start = False
            self._is_reported = self._is_reported or self._phase is ReplyPhase.OUT
        text, self._tail = self._tail + text, ""
        kept = len(text.rstrip()) if self._region.strips else len(text)
        self._tail = text[kept:]
        self._text(self._kind, text[:kept])

    def _trim(self, text: str) -> None:
        """Drop a marker of reasoning, unless reasoning is given out as written."""
        if self._keep_markers:
            self._text(ReasoningDelta, text)


def _complain(text: str) -> None:
    """Log an error, once for each text."""
    if text not in _COMPLAINTS and len(_COMPLAINTS) < MAX_COMPLAINTS:
        _COMPLAINTS.add(text)
        logger.error(text)
