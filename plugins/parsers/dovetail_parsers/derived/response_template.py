r"""A checkpoint's `response_template`: what it says itself of its replies, beside the chat template.

```json
{"start_anchor": "<|im_start|>assistant\n", "fields": {
  "thinking": {"open": "<think>", "close": "</think>"},
  "content": {"close": "<|im_end|>"},
  "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": true, "content": "json",
                 "transform": {"type": "function", "function": "{content}"}}}}
```

Fields between literal texts, with calls as JSON, are markers like those of any format. Where a field is told by
patterns, or calls in another way, the whole is read as regions (`regions.py`), if the chat template says nothing of
replies. What cannot be used is in the log once.

Defined by the documentation of transformers' chat response parsing (`response_template`, version 1).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from dovetail.contracts.output import Markers, NewCall, ToolBody
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail_parsers.derived.call_shape import CallShape, Tools
from dovetail_parsers.derived.region_calls import CallForm, Content, HeldCall, RegionCalls
from dovetail_parsers.derived.regions import MakeBody, Part, Region, RegionBoundary, Regions

logger = logging.getLogger("dovetail.text")
MAX_COMPLAINTS = 100
_COMPLAINTS: set[str] = set()
MAX_PATTERN = 2048
"""Characters of an expression."""
_PLACEHOLDER = re.compile(r"\{(?:content\.)?(\w+)\}")
_WITHIN = re.compile(r"\{\w+(?:\.\w+)*\}")
_PARTS: dict[str, Part] = {
    "thinking": "thinking",
    "reasoning_content": "thinking",
    "reasoning": "thinking",
    "content": "content",
    "tool_calls": "tool_calls",
}


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """What a response template says; None for what it does not say, or says in patterns.

    `regions` is all of it, where a part is told in another way than by the markers of the other attributes.
    """

    reasoning: Markers | None = None
    answer: Markers | None = None
    calls: CallShape | None = None
    regions: Regions | None = None


def declared(template: Any) -> TemplateFormat:
    """Read a response template; one that is broken says nothing, and the log says why."""
    if not isinstance(template, Mapping):
        return TemplateFormat()
    try:
        return _read(template)
    except (ValueError, TypeError, KeyError, re.error, regex.error) as error:
        _complain(f"response_template of tokenizer_config.json is not used: {error}")
        return TemplateFormat()


def _read(template: Mapping[str, Any]) -> TemplateFormat:
    version, fields = template.get("version", 1), template.get("fields")
    if version != 1 or not isinstance(fields, Mapping):
        raise ValueError(f"version {version!r} is not known" if version != 1 else "it has no fields")
    found = {name: _anchors(name, field) for name, field in fields.items()}
    reasoning = answer = calls = None
    if edges := found.get("thinking", found.get("reasoning_content")):
        reasoning = _thinking(edges, next(fields[name] for name in _PARTS if name in fields)) if all(edges) else None
    if (edges := found.get("content")) and all(edges):
        answer = Markers(*edges, after_start="", before_end="", after_end="")
    if edges := found.get("tool_calls"):
        calls = _calls(edges, fields["tool_calls"])
    is_read = (reasoning is not None or not {"thinking", "reasoning_content", "reasoning"} & found.keys()) and (
        calls is not None or "tool_calls" not in found
    )
    regions = None if is_read else _regions(template, fields)
    return TemplateFormat(reasoning, answer, calls, regions)


def _thinking(edges: tuple[str, str], field: Mapping[str, Any]) -> Markers:
    """Return the markers of thinking; where there are several, the first are those that the engine knows."""
    given = [[value] if isinstance(value := field[key], str) else value for key in ("open", "close")]
    also = [(start.strip(), end.strip()) for start in given[0] for end in given[1]]
    return Markers(*edges, ended_by_tools=True, also=tuple(also[1:]))


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
    if any(isinstance(field.get(key), list) and len(field[key]) > 1 for key in ("open", "close")):
        return None
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
        arguments_keys = tuple(dict.fromkeys((keys[1], "arguments")))
        return JsonCalls(new_call, name_key=keys[0], arguments_keys=arguments_keys, tools=tools)

    return CallShape("json", start, end, body, before="\n", shown={"name": keys[0], "arguments": keys[1]})


def _regions(template: Mapping[str, Any], fields: Mapping[str, Any]) -> Regions:
    """Compile every field."""
    read = tuple(_region(name, field) for name, field in fields.items() if name in _PARTS)
    if sum(region.open is None for region in read) > 1:
        raise ValueError("more than one field has neither open nor open_pattern")
    anchor = _edge("the template", template, "start_anchor")
    return Regions(read, None if anchor is None else anchor.pattern)


def _region(name: str, field: Mapping[str, Any]) -> Region:
    edges = [_edge(f"field {name!r}", field, key) for key in ("open", "close")]
    settings = field.get("content_args", {})
    if not isinstance(settings, Mapping):
        raise TypeError(f"field {name!r}: content_args is no object")
    content = Content(field.get("content", "text"), settings)
    content.check()
    part = _PARTS[name]
    body = _body(content, field) if part == "tool_calls" else None
    if part == "tool_calls" and edges[0] is None:
        raise ValueError("field 'tool_calls' has neither open nor open_pattern")
    return Region(part, edges[0], edges[1], strips=bool(settings.get("strip", True)), body=body)


def _edge(scope: str, field: Mapping[str, Any], key: str) -> RegionBoundary | None:
    """Compile what opens or closes a region: a literal, several, or an expression."""
    source = field.get(f"{key}_pattern")
    if source is not None:
        if not isinstance(source, str) or len(source) > MAX_PATTERN:
            raise ValueError(f"{scope}: {key}_pattern is no text of at most {MAX_PATTERN} characters")
        return RegionBoundary(regex.compile(source, regex.DOTALL), False)
    given = field.get(key)
    if given is None:
        return None
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise TypeError(f"{scope}: {key} is neither a text nor a list of texts")
    ordered = sorted(set(texts), key=len, reverse=True)
    is_fixed = not any(one != other and one.startswith(other) for one in ordered for other in ordered)
    return RegionBoundary(regex.compile("|".join(map(regex.escape, ordered)), regex.DOTALL), is_fixed)


def _body(content: Content, field: Mapping[str, Any]) -> MakeBody:
    """Return what reads a call's region."""
    transform, each = field.get("transform"), bool(field.get("transform_each"))
    if transform is None:
        transform = "{content}"
    _check_transform(transform)
    function = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    paths = {key: str(function.get(key, "")) for key in ("name", "arguments")} if isinstance(function, Mapping) else {}
    is_plain = content.name == "json" and not content.settings
    prefix = "{" if each else "{content."
    if is_plain and paths and all(_is_key(path, prefix) for path in paths.values()):
        name_key, arguments_key = (path[len(prefix) : -1] for path in paths.values())
        return lambda new_call, tools, captured: JsonCalls(
            new_call, name_key=name_key, arguments_keys=tuple(dict.fromkeys((arguments_key, "arguments")))
        )
    if is_plain and function == "{content}":
        return lambda new_call, tools, captured: JsonCalls(new_call)
    form = CallForm(content, transform, each)
    name = paths.get("name", "").strip("{}")
    if is_plain and not each and paths.get("arguments") == "{content}":
        return lambda new_call, tools, captured: (
            HeldCall(new_call, captured[name]) if captured.get(name) else RegionCalls(new_call, tools, captured, form)
        )
    return lambda new_call, tools, captured: RegionCalls(new_call, tools, captured, form)


def _check_transform(transform: Any) -> None:
    """Raise where a text is neither a placeholder nor free of them."""
    if isinstance(transform, Mapping):
        transform = [*transform.values()]
    if isinstance(transform, list):
        for each in transform:
            _check_transform(each)
    elif isinstance(transform, str) and _WITHIN.search(transform) and not _WITHIN.fullmatch(transform):
        raise ValueError(f"field 'tool_calls': transform {transform!r} mixes a placeholder with other text")


def _is_key(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and path.endswith("}") and path[len(prefix) : -1].isidentifier()


def _complain(text: str) -> None:
    """Warn, once for each text."""
    if text not in _COMPLAINTS and len(_COMPLAINTS) < MAX_COMPLAINTS:
        _COMPLAINTS.add(text)
        logger.warning(text)
