r"""A checkpoint's `response_template`: what it says itself of its replies, beside the chat template.

```json
{"start_anchor": "<|im_start|>assistant\n", "fields": {
  "thinking": {"open": "<think>", "close": "</think>"},
  "content": {"close": "<|im_end|>"},
  "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": true, "content": "json",
                 "transform": {"type": "function", "function": "{content}"}}}}
```

Read are fields between literal texts: thinking, an answer, and calls as JSON. A field that patterns describe is told by
the chat template, or not at all; what cannot be read is in the log once.

Defined by the documentation of transformers' chat response parsing (`response_template`, version 1).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.contracts.reasoning import Markers
from dovetail.contracts.tools import NewCall, ToolBody
from dovetail.text.call_shape import CallShape, Tools
from dovetail.text.json_calls import JsonCalls

logger = logging.getLogger("dovetail.text")
MAX_COMPLAINTS = 100
_COMPLAINTS: set[str] = set()
_PLACEHOLDER = re.compile(r"\{(?:content\.)?(\w+)\}")


@dataclass(frozen=True, slots=True)
class Declared:
    """What a response template says; None for what it does not say, or says in patterns."""

    reasoning: Markers | None = None
    answer: Markers | None = None
    calls: CallShape | None = None


def declared(template: Any) -> Declared:
    """Read a response template; one that is broken says nothing, and the log says why."""
    if not isinstance(template, Mapping):
        return Declared()
    try:
        return _read(template)
    except (ValueError, TypeError, re.error) as error:
        _complain(f"response_template of tokenizer_config.json is not used: {error}")
        return Declared()


def _read(template: Mapping[str, Any]) -> Declared:
    version, fields = template.get("version", 1), template.get("fields")
    if version != 1 or not isinstance(fields, Mapping):
        raise ValueError(f"version {version!r} is not known" if version != 1 else "it has no fields")
    found = {name: _anchors(name, field) for name, field in fields.items()}
    reasoning = answer = calls = None
    if edges := found.get("thinking", found.get("reasoning_content")):
        reasoning = Markers(*edges, ended_by_tools=True) if all(edges) else None
        _check_read("thinking", reasoning)
    if (edges := found.get("content")) and all(edges):
        answer = Markers(*edges, after_start="", before_end="", after_end="")
    if edges := found.get("tool_calls"):
        calls = _calls(edges, fields["tool_calls"])
        _check_read("tool_calls", calls)
    return Declared(reasoning, answer, calls)


def _anchors(name: str, field: Any) -> tuple[str, str]:
    """Return the literal texts around a field, empty where there is none."""
    if not isinstance(field, Mapping):
        raise TypeError(f"field {name!r} is no object")
    for key in ("open_pattern", "close_pattern"):
        if key in field:
            try:
                re.compile(field[key])
            except (re.error, TypeError) as error:
                raise ValueError(f"field {name!r}: {key} is no regular expression: {error}") from error
    start, end = (_literal(name, field, key) for key in ("open", "close"))
    return start, end


def _literal(name: str, field: Mapping[str, Any], key: str) -> str:
    given = field.get(key, "")
    first = given[0] if isinstance(given, list) and given else given
    if not isinstance(first, str):
        raise TypeError(f"field {name!r}: {key} is neither a text nor a list of texts")
    return first.strip()


def _calls(edges: tuple[str, str], field: Mapping[str, Any]) -> CallShape | None:
    """Return the shape of calls that are JSON objects between two texts."""
    start, end = edges
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if not (start and end) or field.get("content") != "json" or field.get("content_args"):
        return None
    if function == "{content}":
        keys = ("name", "arguments")
    elif isinstance(function, Mapping):
        read = [_PLACEHOLDER.fullmatch(str(function.get(key))) for key in ("name", "arguments")]
        if read[0] is None or read[1] is None:
            return None
        keys = (read[0][1], read[1][1])
    else:
        return None

    def body(new_call: NewCall, tools: Tools) -> ToolBody:
        return JsonCalls(new_call, name_key=keys[0], arguments_keys=tuple(dict.fromkeys((keys[1], "arguments"))))

    return CallShape("json", start, end, body, before="\n", shown={"name": keys[0], "arguments": keys[1]})


def _check_read(name: str, found: object) -> None:
    """Say so where a field is described in a way that is not read."""
    if found is None:
        _complain(f"response_template of tokenizer_config.json: {name} is described by patterns, which are not read")


def _complain(text: str) -> None:
    """Warn, once for each text."""
    if text not in _COMPLAINTS and len(_COMPLAINTS) < MAX_COMPLAINTS:
        _COMPLAINTS.add(text)
        logger.warning(text)
