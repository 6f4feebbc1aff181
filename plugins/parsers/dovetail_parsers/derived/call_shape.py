"""The shape of a call, read off a rendered one: which text stands around names, keys and values.

`read_shape` finds the sentinels in the text that a template rendered for two calls (`dovetail.sdk.formats.samples`),
takes the texts between them, and says which of the four `ToolBody`s reads them, with which markers:

| what stands around the sentinels | body |
|---|---|
| an object of a name and arguments, or of the name alone | `JsonCalls` |
| an object of the arguments, the name in front of it | `HeadedCalls` |
| `NAME(KEY="VALUE"` | `PythonicCalls` |
| other text, the same before each key and behind each value | `TaggedCalls` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import (
    Node,
    Tool,
    calls_grammar,
    json_arguments,
    name_of,
    tagged_arguments,
)
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.matcher import common_len
from dovetail.sdk.formats.samples import FIRST, KEYS, NAMES, SECOND, UNIT, VALUES
from dovetail.sdk.formats.tags import Tags, plain_key
from dovetail_parsers.families.headed_calls import Head, HeadedCalls
from dovetail_parsers.families.pythonic_calls import PythonicCalls, keyword_arguments
from dovetail_parsers.families.tagged_calls import TaggedCalls, key_before_attributes

_ATTRIBUTES = re.compile(r"([\"'])\s[^<>]*>")
"""Closes a key in quotes and holds more attributes, as the type of its value."""
_SPACES = " \t\r\n"

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Frame:
    """What a template writes around the arguments of a call, for grammars.

    Attributes:
        before: In front of the arguments, with the first sentinel for the name.
        behind: Behind them.
        separator: Between two calls.
        section: Around all calls; None where each is a section of its own.
        arguments: Describes a tool's arguments.
    """

    before: str
    behind: str
    separator: str
    section: tuple[str, str] | None
    arguments: Callable[[Tool], Node] = json_arguments


@dataclass(frozen=True, slots=True)
class CallShape:
    """How calls are written.

    Attributes:
        kind: `json`, `headed`, `tagged` or `pythonic`.
        start: Opens a section.
        end: Closes it; empty where nothing does.
        before: Newlines in front of the section.
        bare: Opens a section where there are no markers.
        inner: Markers inside a section.
        also: Texts that open a call without its section.
        body: Makes the reader of a section.
        frame: What stands around arguments; None where grammars are not possible.
        shown: What `dovetail info` says of it.
    """

    kind: str
    start: str
    end: str
    body: Callable[[NewCall, Tools], ToolBody]
    before: str = ""
    bare: str = ""
    inner: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    frame: Frame | None = None
    shown: Mapping[str, str] = field(default_factory=dict)

    def tool_format(self, tools: Tools) -> ToolFormat:
        """Return the format for a request."""
        return ToolFormat(
            self.start,
            self.end,
            body=lambda new_call: self.body(new_call, tools),
            before_start=self.before,
            bare=self.bare,
            inner=self.inner,
            also=self.also,
        )

    def grammar(self, tools: Tools, choice: Any, parallel: bool) -> GrammarSpec | None:
        """Describe the calls that a `tool_choice` allows, as the template writes them."""
        frame = self.frame
        if frame is None:
            return None
        opening = frame.before.partition(NAMES[0])[0] if frame.section is None else frame.section[0]
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (frame.before.replace(NAMES[0], name_of(tool)), frame.arguments(tool), frame.behind),
            section=frame.section,
            separator=frame.separator,
            trigger=self.start or opening,
        )


def read_shape(text: str, end: str) -> CallShape | None:
    """Read the shape of the two calls in a text, or of one where the template writes no more.

    Args:
        text: What the template writes from the first call on.
        end: What it writes at the end of a turn.
    """
    if NAMES[0] not in text:
        return None
    text = _without(text, end)
    return _json_shape(text) or _headed_shape(text) or _tagged_shape(text)


def _without(text: str, end: str) -> str:
    """Drop the end of a turn: all of it, or what follows its first marker."""
    if end and text.endswith(end):
        return text[: -len(end)]
    marker = next(iter(UNIT.findall(end)), "")
    place = text.rfind(marker) if marker else -1
    return text[:place] if place > max(text.rfind(VALUES[1]), text.rfind(VALUES[2])) else text


def _objects(text: str, place: int) -> list[tuple[int, int, Any]]:
    """Return the JSON objects around a place, the innermost first."""
    found = []
    begin = text.rfind("{", 0, place)
    while begin >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
        except ValueError:
            pass
        else:
            if end > place:
                found.append((begin, end, value))
        begin = text.rfind("{", 0, begin)
    return found


def _is(value: Any, arguments: Mapping[str, str]) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return bool(value == arguments)


def _json_shape(text: str) -> CallShape | None:
    spans, keys = [], set()
    for name, arguments in zip(NAMES, (FIRST, SECOND), strict=True):
        if name not in text:
            continue
        span, key = _call_object(text, name, arguments)
        if span is None:
            return None
        spans.append(span)
        keys.add(key)
    if len(keys) != 1:
        return None
    name_key, arguments_key = keys.pop()
    pre, post = text[: spans[0][0]], text[spans[-1][1] :]
    gap = text[spans[0][1] : spans[1][0]] if len(spans) > 1 else ""
    around = _around(pre.rstrip(_SPACES + "["), gap.strip(_SPACES + "[],;"), post.lstrip(_SPACES + "]"))
    if around is None:
        return None
    start, end, begin, _ = around
    if begin and not begin.startswith(start):
        return None
    start = begin or start

    def body(new_call: NewCall, tools: Tools) -> ToolBody:
        known = None if start else _names(tools)
        keys = (arguments_key, "arguments", "parameters")
        unique = tuple(dict.fromkeys(keys))
        return JsonCalls(new_call, name_key=name_key, arguments_keys=unique, known=known, tools=tools)

    bare = "" if start else pre.strip()[:1] or "{"
    shown = {"name": name_key or "(the key)", "arguments": arguments_key}
    inside = [span for span in _objects(text, text.find(KEYS[0])) if span[2] == FIRST]
    frame = _frame(text, spans, inside[0][:2], begin, end) if inside else None
    return CallShape("json", start, end, body, before=_newlines(pre), bare=bare, frame=frame, shown=shown)


def _call_object(text: str, name: str, arguments: Mapping[str, str]) -> tuple[Any, Any]:
    """Return where the object of a call stands, and the keys of its name and arguments."""
    place = text.find(name)
    for begin, end, value in _objects(text, place):
        if value == {name: arguments}:
            return (begin, end), (None, "")
        name_key = next((key for key, item in value.items() if item == name), None)
        arguments_key = next((key for key, item in value.items() if _is(item, arguments)), None)
        if name_key is not None and arguments_key is not None:
            outer = [span for span in _objects(text, place) if isinstance(span[2].get("function"), dict)]
            span = outer[0] if outer and outer[0][2]["function"] == value else (begin, end, value)
            return (span[0], span[1]), (name_key, arguments_key)
    return None, None


def _names(tools: Tools) -> frozenset[str]:
    return frozenset(str(tool.get("function", {}).get("name")) for tool in tools)


def _headed_shape(text: str) -> CallShape | None:
    spans = []
    for key, arguments in ((KEYS[0], FIRST), (KEYS[2], SECOND)):
        if key not in text:
            return None
        found = [(begin, end) for begin, end, value in _objects(text, text.find(key)) if value == arguments]
        if not found:
            return None
        spans.append(found[0])
    places = [text.find(name) for name in NAMES]
    if not places[0] < spans[0][0] < places[1] < spans[1][0]:
        return None
    pre = text[: places[0]]
    stops_of = [text[place + len(name) : span[0]] for place, name, span in zip(places, NAMES, spans, strict=True)]
    stop = _common_end(*stops_of)
    gap, post = text[spans[0][1] : places[1]], text[spans[1][1] :]
    around = _around(pre, gap, post)
    if around is None:
        return None
    start, end, begin, call_end = around
    units = UNIT.findall(begin) or [begin.strip()]
    mark, prefix = units[0], begin[begin.find(units[0]) + len(units[0]) :]
    pattern = re.compile(
        rf"\s*(?:{re.escape(prefix.strip())})?\s*([\w.:/\-]+?)(?::\d+)?[\s`]*"
        if prefix.strip()
        else r"\s*([\w.:/\-]+)[\s`]*"
    )

    def read_head(head: str) -> Head | None:
        found = pattern.fullmatch(head)
        return None if found is None else (found[1], None)

    stops = (stop.strip(),) if stop.strip() else ()
    tail = call_end.strip("` \t\r\n")

    def body(new_call: NewCall, tools: Tools) -> ToolBody:
        begin = "" if mark == start else mark
        return HeadedCalls(new_call, read_head=read_head, stops=stops, begin=begin, end=tail, tools=tools)

    inner = tuple(unit for unit in (mark, *UNIT.findall(prefix + stop + tail)) if unit not in (start, end))
    also = (mark,) if mark != start else ()
    shown = {"call": mark, "stop": stop.strip(), "call_end": tail}
    calls = [
        (text.rfind(mark, 0, place), text.find(tail, span[1]) + len(tail) if tail else span[1])
        for place, span in zip(places, spans, strict=True)
    ]
    frame = _frame(text, calls, spans[0], mark if mark == start else "", end)
    before = _newlines(pre)
    return CallShape("headed", start, end, body, before=before, inner=inner, also=also, frame=frame, shown=shown)


def _around(pre: str, gap: str, post: str) -> tuple[str, str, str, str] | None:
    """Read what stands around calls off the text before the first, between two, and behind the last.

    Returns:
        The section's start and end, and a call's; the same where each call is a section.
    """
    pre, gap, post = pre.strip(), gap.strip(), post.strip()
    begin = _common_end(pre, gap)
    section = pre[: len(pre) - len(begin)].strip()
    call_end = gap[: len(gap) - len(begin)].strip()
    if not post.startswith(call_end):
        return None
    section_end = post[len(call_end) :].strip()
    if section or (not begin and not call_end):
        return section, _first_marker(section_end), begin, call_end
    units = UNIT.findall(begin)
    start = units[0] if units else begin
    return start, call_end or _first_marker(section_end), begin, call_end


def _frame(text: str, calls: Sequence[tuple[int, int]], inside: tuple[int, int], begin: str, end: str) -> Frame:
    """Read what stands around arguments off the first of the calls.

    Args:
        text: As for `read_shape`, without the end of the turn.
        calls: Where each call stands, without the markers of its section.
        inside: Where the first call's arguments stand.
        begin: The marker of a section where each call is one; empty where one section holds all.
        end: What closes a section.
    """
    first, behind = calls[0]
    if not begin:
        separator = text[behind : calls[1][0]] if len(calls) > 1 else ", "
        section = (text[:first].lstrip("\n"), text[calls[-1][1] :])
        section = (section[0], section[1][: section[1].find(end) + len(end)] if end else section[1].rstrip("\n"))
        around = section if any(part.strip() for part in section) else None
        return Frame(text[first : inside[0]], text[inside[1] : behind], separator, around)
    first = text.find(begin)
    close = text.find(end, inside[1]) + len(end) if end else behind
    again = text.find(begin, close)
    separator = text[close:again] if again >= 0 else "\n"
    return Frame(text[first : inside[0]], text[inside[1] : close], separator, None)


def _first_marker(text: str) -> str:
    """Return a section's end without what ends the turn behind it."""
    units = UNIT.findall(text)
    return text[: text.find(units[0]) + len(units[0])] if units else text


def _common_end(one: str, other: str) -> str:
    """Return the longest end that two texts share and that begins with a marker or a text of its own."""
    common = one[len(one) - common_len(one[::-1], other[::-1]) :].strip()
    while common and not (_whole(common, one) and _whole(common, other)):
        common = common[1:]
    return common.strip()


def _whole(end: str, text: str) -> bool:
    """Whether an end of a text does not begin inside a marker."""
    place = len(text) - len(end)
    return not any(found.start() < place < found.end() for found in UNIT.finditer(text))


def _newlines(pre: str) -> str:
    """Return the newlines that stand in front of the first call."""
    return pre[: len(pre) - len(pre.lstrip("\n"))]


def _tagged_shape(text: str) -> CallShape | None:
    """Read tags, or Python calls, off what stands between the sentinels."""
    parts = []
    rest = text
    for sentinel in (NAMES[0], KEYS[0], VALUES[0], KEYS[1], VALUES[1], NAMES[1], KEYS[2], VALUES[2]):
        before, found, rest = rest.partition(sentinel)
        if not found:
            return None
        parts.append(before)
    pre, to_key, to_value, next_key, to_value_again, to_name, second_key, second_value = parts
    if not to_value == to_value_again == second_value or to_key != second_key:
        return None
    if to_key.startswith("(") and to_value[:1] == "=":
        return _pythonic_shape(pre, to_name, rest)
    if not to_value.strip():
        return None
    key_open = _common_end(to_key.strip(), next_key.strip())
    name_close = to_key.strip()[: len(to_key.strip()) - len(key_open)].strip()
    value_end = next_key.strip()[: len(next_key.strip()) - len(key_open)].strip()
    if (
        not key_open
        or not value_end
        or not to_name.strip().startswith(value_end)
        or not rest.strip().startswith(value_end)
    ):
        return None
    around = _around(pre, to_name.strip()[len(value_end) :], rest.strip()[len(value_end) :])
    if around is None:
        return None
    shape = _tags_of(around, name_close, key_open, to_value, value_end, next_key.startswith("\n"))
    if shape is None:
        return None
    made, tags = shape
    behind_value = next_key[: len(next_key) - len(key_open)].partition(value_end)[2]
    inside = (text.find(key_open, len(pre)), text.find(value_end, text.find(VALUES[1])) + len(value_end + behind_value))
    begin = tags.call[0] or made.start
    calls = []
    for name in (name for name in NAMES if name in text):
        place = text.find(name)
        close = made.end if begin == made.start else tags.call_end
        calls.append((text.rfind(begin, 0, place), text.find(close, place) + len(close)))
    marker = made.start if text[: inside[0]].count(made.start) and text.count(made.start) > 1 else ""
    frame = _frame(text, calls, inside, marker if made.start else "", made.end)
    spaces = to_value[: to_value.find(tags.value_start)].removeprefix(tags.key[1]) if tags.value_start else ""

    attributes = to_value.partition(">")[0] if tags.read_key is key_before_attributes else ""

    def arguments(tool: Tool) -> Node:
        return tagged_arguments(
            tool,
            tags,
            key=lambda name, _: name + attributes,
            behind_key=spaces,
            behind_value=behind_value,
            section_end=made.end,
        )

    return replace(made, before=_newlines(pre), frame=replace(frame, arguments=arguments))


def _tags_of(
    around: tuple[str, str, str, str], name_close: str, key_open: str, to_value: str, value_end: str, is_newline: bool
) -> tuple[CallShape, Tags] | None:
    start, end, begin, call_end = around
    if start == begin.strip() and name_close:
        start, end, call_open = "", "", begin
    elif start == begin.strip() or not begin.startswith(start):
        call_open = "" if start == begin.strip() else begin
    else:
        call_open = begin[len(start) :].strip()
        units = UNIT.findall(call_end)
        if len(units) < 2:
            return None
        end, call_end = units[-1], call_end[: call_end.rfind(units[-1])].strip()
    if call_open and not name_close:
        return None
    close, opened = _split_value_start(to_value.strip())
    if not close:
        return None
    has_attributes = _ATTRIBUTES.fullmatch(close) is not None
    tags = Tags(
        call=(call_open, name_close) if call_open else ("", ""),
        call_end=call_end if call_open else "",
        key=(key_open, ">" if has_attributes else close),
        read_key=key_before_attributes if has_attributes else plain_key,
        value_start=opened,
        value_end=value_end,
        newlines=is_newline and to_value.endswith("\n"),
    )

    def body(new_call: NewCall, tools: Tools) -> ToolBody:
        return TaggedCalls(new_call, tags, tools)

    pieces = (*tags.call, tags.call_end, *tags.key, tags.value_start, tags.value_end)
    inner = tuple(dict.fromkeys(unit for piece in pieces for unit in UNIT.findall(piece)))
    shown = {"call": f"{call_open}NAME{name_close}", "parameter": f"{key_open}KEY{to_value}VALUE{value_end}"}
    also = (call_open,) if call_open else ()
    return CallShape("tagged", start, end, body, inner=inner, also=also, shown=shown), tags


def _split_value_start(text: str) -> tuple[str, str]:
    """Split what stands between key and value into what closes the key and what opens the value."""
    units = UNIT.findall(text)
    if len(units) == 2 and text.startswith(units[0]) and text.endswith(units[1]):
        return units[0], units[1]
    return text, ""


def _pythonic_shape(pre: str, gap: str, post: str) -> CallShape | None:
    """Read what stands around a list of Python calls."""
    start = pre.strip().removesuffix("[").strip()
    end = post.strip().lstrip("\"')").strip().removeprefix("]").strip()

    def body(new_call: NewCall, tools: Tools) -> ToolBody:
        return PythonicCalls(new_call, tools)

    if start and gap.strip("\"') \n,"):
        return None
    frame = Frame(f"{NAMES[0]}(", ")", ", ", (f"{start}[", f"]{end}"), keyword_arguments)
    return CallShape("pythonic", start, end, body, before=_newlines(pre), bare="" if start else "[", frame=frame)
