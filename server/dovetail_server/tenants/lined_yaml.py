"""YAML whose values are texts, lists and mappings, with the line of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import yaml

MAX_DEPTH = 8
LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""Only its events are used: its nodes are made by recursion, which in libyaml's fast one ends the process."""
Steps = tuple[str | int, ...]


class FaultError(Exception):
    """What is wrong in a document: `line 7: …`."""


def read(raw: bytes, lines: dict[Steps, int]) -> Any:
    """Return the value of the only document, None for none. Notes in `lines` where each part of it stands.

    Raises:
        FaultError: It is no UTF-8, no YAML, or what `_document` or `_value` do not take.
    """
    try:
        return _document(yaml.parse(raw.decode("utf-8"), Loader=LOADER), lines)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise FaultError(f"line {line}: not UTF-8") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = 1 if mark is None else mark.line + 1
        raise FaultError(f"line {line}: not valid YAML{f': {problem}' if problem else ''}") from None


def _document(events: Iterator[yaml.Event], lines: dict[Steps, int]) -> Any:
    """Return the value of the only document, None for none. Notes in `lines` where each part of it stands.

    Raises:
        FaultError: There are several documents, or see `_value`.
    """
    found = [event for event in itertools.islice(events, 3) if isinstance(event, yaml.NodeEvent)]
    value = _value(events, found[0], (), lines) if found else None
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            raise FaultError(f"{_line(event)}: a second document begins; the file is one")
    return value


def _value(events: Iterator[yaml.Event], first: yaml.Event, path: Steps, lines: dict[Steps, int]) -> Any:
    """Return the value whose events begin with `first`: texts, lists and mappings.

    Raises:
        FaultError: A field stands twice in one place, its name is no text, or values nest too deeply; or there is an
            alias: what it repeats may have no end.
    """
    lines[path] = _line_number(first)
    if isinstance(first, yaml.AliasEvent):
        raise FaultError(f"{_line(first)}: YAML's aliases (*name) are not taken; write the value out")
    if isinstance(first, yaml.ScalarEvent):
        return first.value
    if len(path) > MAX_DEPTH:
        raise FaultError(f"{_line(first)}: is nested too deeply")
    if isinstance(first, yaml.SequenceStartEvent):
        items: list[Any] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_value(events, event, (*path, len(items)), lines))
        return items
    fields: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        if not isinstance(event, yaml.ScalarEvent):
            raise FaultError(f"{_line(event)}: the name of a field is no text; write a word")
        if event.value in fields:
            raise FaultError(f"{_line(event)}: {event.value!r} is given twice")
        fields[event.value] = _value(events, next(events), (*path, event.value), lines)
    return fields


def _line_number(event: yaml.Event) -> int:
    return 1 if event.start_mark is None else event.start_mark.line + 1


def _line(event: yaml.Event) -> str:
    return f"line {_line_number(event)}"
