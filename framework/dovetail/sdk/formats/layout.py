"""Where a format's markers may stand: `FormatSpec` compiled to what ends a run of text in each phase of a reply.

```
phase   marker        leads to
OPEN    start         IN    (behind text, where it is not only named; else literal)
        end           OUT   (only before any text; else literal)
        answer start  OUT
        tool start    TOOL
IN      end           OUT   (where it is not only named; else literal)
        start         IN    (repeated before any text: swallowed; else literal)
        tool start    ASIDE (where the format says so; else literal)
        answer start  OUT   (where the format says so; else literal)
ASIDE   end           CLOSED
        answer start  OUT   (as in IN)
CLOSED  as OUT; whatever comes shows that the call was only thought about
OUT     tool start    TOOL
        end           OUT   (once, where an answer ended thinking; else literal)
TOOL    tool end      OUT
        tool start    TOOL  (the section before it was not closed)
```
The markers around an answer count in OPEN and OUT: the first before any text, the second behind the first. Any other
marker in a phase is literal text.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

from dovetail.contracts.output import FormatSpec, Markers
from dovetail.sdk.formats.matcher import Matcher, matcher

_SIGN = re.compile(r"[^\w\s]|_")
"""What a special token inside a marker begins or ends with."""


class ReplyPhase(enum.Enum):
    """Where a reply stands. The first three are `contracts.output.State`."""

    OPEN = "open"
    IN = "in"
    OUT = "out"
    TOOL = "tool"
    ASIDE = "aside"
    """In thinking, behind the beginning of a call: see `aside.py`."""
    CLOSED = "closed"
    """Behind the end of thinking that held one; only whitespace came since."""

    __hash__ = object.__hash__  # looked up for every token; Enum's own is written in Python


class Role(enum.Enum):
    """What a marker is for."""

    START = "start"
    END = "end"
    ANSWER_START = "answer_start"
    ANSWER_END = "answer_end"
    DROPPED = "dropped"
    TOOL_START = "tool_start"
    TOOL_TEXT = "tool_text"
    """Opens a section and is part of it."""
    TOOL_BARE = "tool_bare"
    """As `TOOL_TEXT`, where an answer begins with it; else literal."""
    TOOL_END = "tool_end"
    BREAK = "break"
    """Ends thinking and is content."""


@dataclass(frozen=True, slots=True)
class PhaseMarkers:
    """The markers of one phase: those matched by token id, and those matched in the text; `number` is its own.

    `bare` are characters that count as a marker where an answer begins with one; they are not in `matcher`, where the
    match that ends first would hide all longer markers.
    """

    ids: Mapping[int, enum.Enum]
    roles: Mapping[str, enum.Enum]
    matcher: Matcher | None
    bare: str
    number: int = field(default_factory=count().__next__, compare=False)


@dataclass(frozen=True, slots=True)
class FormatLayout:
    """A compiled format.

    Attributes:
        by_ids: Views for output that comes as token ids.
        by_text: Views for text without ids, where every marker is matched in the text.
        marker_ids: Ids of all markers that are tokens, those inside tool sections included.
        kept: Ids of tokens that are parts of markers: they give text, also where they are special.
        marker_text: The markers' text by id.
    """

    by_ids: Mapping[ReplyPhase, PhaseMarkers]
    by_text: Mapping[ReplyPhase, PhaseMarkers]
    marker_ids: frozenset[int]
    kept: frozenset[int]
    marker_text: Mapping[int, str]


def compile_layout(spec: FormatSpec, added_tokens: Mapping[str, int]) -> FormatLayout:
    """Compile a format for a vocabulary. A marker that is an added token is matched by its id only."""
    reasoning, tools, answer = spec.reasoning, spec.tools, spec.answer
    texts = [] if reasoning is None else [reasoning.start, reasoning.end]
    texts += [] if answer is None else [answer.start, answer.end]
    texts += [] if tools is None else [tools.start, tools.end, *tools.also, *tools.starts, *tools.inner]
    texts += spec.dropped
    texts += reasoning.ended_by if reasoning is not None and tools is None else ()
    token_ids = tuple([(text, added_tokens[text]) for text in dict.fromkeys(texts) if text in added_tokens])
    # A marker of several tokens is matched in the text: those of them that are special give theirs.
    spelled = {text for text in texts if text not in added_tokens}
    kept = frozenset([added_tokens[part] for text in spelled for part in added_tokens.keys() & _parts(text)])
    also = () if tools is None else (*tools.also, *tools.starts)
    of_tools = None if tools is None else (tools.start, tools.end, also, tools.bare)
    return _compile(reasoning, answer, of_tools, spec.dropped, token_ids, kept)


@lru_cache(maxsize=1024)
def _parts(text: str) -> frozenset[str]:
    """Return the texts in a marker that may be tokens of their own: what lies between signs."""
    begins = {found.start() for found in _SIGN.finditer(text)}
    ends = {found.end() for found in _SIGN.finditer(text)}
    edges = sorted(begins | ends | {0, len(text)})
    return frozenset(
        text[begin:end] for begin in edges for end in edges if begin < end and (begin in begins or end in ends)
    )


@lru_cache(maxsize=256)
def _compile(
    reasoning: Markers | None,
    answer: Markers | None,
    tools: tuple[str, str, tuple[str, ...], str] | None,
    dropped: tuple[str, ...],
    token_ids: tuple[tuple[str, int], ...],
    kept: frozenset[int],
) -> FormatLayout:
    phases: dict[ReplyPhase, dict[str, enum.Enum]] = {phase: {} for phase in ReplyPhase}
    if reasoning is not None:
        for phase in (ReplyPhase.OPEN, ReplyPhase.IN):
            phases[phase].update({reasoning.start: Role.START, reasoning.end: Role.END})
            for start, end in reasoning.also:
                phases[phase].update({start: Role.START, end: Role.END})
        if tools is None:
            phases[ReplyPhase.IN].update(dict.fromkeys(reasoning.ended_by, Role.BREAK))
    for phase in (ReplyPhase.OPEN, ReplyPhase.OUT):
        phases[phase].update(dict.fromkeys(dropped, Role.DROPPED))
    if answer is not None:
        for phase in (ReplyPhase.OPEN, ReplyPhase.OUT):
            phases[phase].update({answer.start: Role.ANSWER_START, answer.end: Role.ANSWER_END})
        if reasoning is not None and reasoning.ended_by_answer:
            phases[ReplyPhase.IN].update({answer.start: Role.ANSWER_START, **dict.fromkeys(dropped, Role.DROPPED)})
            phases[ReplyPhase.OUT].setdefault(reasoning.end, Role.END)
    if tools is not None:
        start, end, also, bare = tools
        for phase in (ReplyPhase.OPEN, ReplyPhase.OUT):
            phases[phase].update(dict.fromkeys(bare, Role.TOOL_BARE))
            phases[phase].update(dict.fromkeys(also, Role.TOOL_TEXT))
            phases[phase].update({start: Role.TOOL_START} if start else {})
        if reasoning is not None and reasoning.ended_by_tools:
            phases[ReplyPhase.IN].update(dict.fromkeys(also, Role.TOOL_TEXT))
            phases[ReplyPhase.IN].update({start: Role.TOOL_START} if start else {})
        phases[ReplyPhase.TOOL].update({start: Role.TOOL_START} if start else {})
        phases[ReplyPhase.TOOL].update({end: Role.TOOL_END} if end else {})
    if reasoning is not None:
        ends = (reasoning.end, *(end for _, end in reasoning.also))
        of_thinking = phases[ReplyPhase.IN]
        breaks = {text: role for text, role in of_thinking.items() if role in (Role.ANSWER_START, Role.DROPPED)}
        phases[ReplyPhase.ASIDE].update({**breaks, **dict.fromkeys(ends, Role.END)})
    phases[ReplyPhase.CLOSED].update(
        {text: role for text, role in phases[ReplyPhase.OUT].items() if role is not Role.TOOL_BARE}
    )
    return make_layout(phases, token_ids, kept)


def make_layout(
    phases: Mapping[ReplyPhase, Mapping[str, enum.Enum]],
    token_ids: Sequence[tuple[str, int]],
    kept: frozenset[int] = frozenset(),
) -> FormatLayout:
    """Make the views of each phase.

    Args:
        phases: The markers that count in each phase, and what each is for.
        token_ids: The markers that are tokens, with their ids.
        kept: Tokens that are parts of markers.
    """
    ids = dict(token_ids)
    return FormatLayout(
        {phase: _view(markers, ids) for phase, markers in phases.items()},
        {phase: _view(markers, {}) for phase, markers in phases.items()},
        frozenset(ids.values()),
        kept,
        {token_id: text for text, token_id in token_ids},
    )


def _view(markers: Mapping[str, enum.Enum], ids: Mapping[str, int]) -> PhaseMarkers:
    spelled = {text: role for text, role in markers.items() if text not in ids}
    bare = "".join(text for text, role in spelled.items() if role is Role.TOOL_BARE)
    texts = tuple(text for text in spelled if text not in bare)
    tokens = {ids[text]: role for text, role in markers.items() if text in ids}
    return PhaseMarkers(tokens, spelled, matcher(texts) if texts else None, bare)
