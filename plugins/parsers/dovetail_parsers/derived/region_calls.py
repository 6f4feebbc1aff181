"""What stands in a call's region of a `response_template`: see `regions.py`, and `response_template.py` for the fields.

| content | read by |
|---|---|
| JSON with the name and the arguments in it | `JsonCalls`, while it is written |
| JSON that is the arguments, the name in the opening match | `HeldCall`, while it is written |
| anything else: JSON in a dialect, tags, lines of keys and values | `RegionCalls`, when the region is complete |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from dovetail.contracts.output import Malformed, NewCall, ToolArgs, ToolBody, ToolEnd, ToolEvent
from dovetail.sdk.formats.json_text import JsonText
from dovetail.sdk.formats.schema_types import properties_of, schemas_by_tool, types_of, value_text

TIMEOUT_S = 0.1
"""For the expressions that read one call."""
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")


@dataclass(frozen=True, slots=True)
class Content:
    """How a field's text becomes a value: the parser's name and its settings."""

    name: str
    settings: Mapping[str, Any]

    def read(self, text: str) -> Any:
        """Return the value.

        Raises:
            ValueError: The text is none of this kind.
            TimeoutError: An expression takes too long.
        """
        readers = {"json": self._json, "xml-inline": self._tags, "kv-lines": self._lines}
        if self.name in readers:
            return readers[self.name](text)
        plain = text.strip() if self.settings.get("strip", True) else text
        if self.name == "bool":
            return plain.lower() in ("true", "1")
        return int(plain) if self.name == "int" else float(plain) if self.name == "float" else plain

    def _json(self, text: str) -> Any:
        strings: list[str] = []

        def keep(found: regex.Match[str]) -> str:
            strings.append(found[1])
            return f"\x01{len(strings) - 1}\x02"

        for begin, end in self.settings.get("string_delims", ()):
            pattern = regex.compile(regex.escape(begin) + "(.*?)" + regex.escape(end), regex.DOTALL)
            text = pattern.sub(keep, text, timeout=TIMEOUT_S)
        if self.settings.get("unquoted_keys"):
            text = regex.sub(r"(?<=[{,])\s*(\w+)\s*:", r'"\1":', text, timeout=TIMEOUT_S)
        text = regex.sub("\x01(\\d+)\x02", lambda found: json.dumps(strings[int(found[1])]), text, timeout=TIMEOUT_S)
        try:
            return json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        except ValueError:
            if self.settings.get("allow_non_json"):
                return text.strip()
            raise

    def _inner(self, text: str) -> Any:
        inner = self.settings.get("value_parser")
        return text if inner is None else Content(inner.get("name", "text"), inner.get("args", {})).read(text)

    def _tags(self, text: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        pattern = regex.compile(self.settings["tag_pattern"], regex.DOTALL)
        for found in pattern.finditer(text, timeout=TIMEOUT_S):
            key, value = found["key"], self._inner(found.groupdict().get("value") or "")
            if key in values and self.settings.get("merge_duplicates"):
                before = values[key] if isinstance(values[key], list) else [values[key]]
                values[key] = [*before, value]
            else:
                values[key] = value
        return values

    def _lines(self, text: str) -> dict[str, Any]:
        between = self.settings.get("kv_sep", ":")
        pairs = [line.partition(between) for line in text.split(self.settings.get("line_sep", "\n"))]
        return {key.strip(): self._inner(value.strip()) for key, found, value in pairs if found}

    def check(self) -> None:
        """Raise ValueError where the settings cannot be used."""
        if self.name not in ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines"):
            raise ValueError(f"content {self.name!r} is not known")
        if self.name == "xml-inline" and "key" not in regex.compile(self.settings.get("tag_pattern", "")).groupindex:
            raise ValueError("tag_pattern has no group 'key'")
        if isinstance(inner := self.settings.get("value_parser"), Mapping):
            Content(inner.get("name", "text"), inner.get("args", {})).check()


def filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Put values in the place of a transform's placeholders, such as `{content.name}`.

    Raises:
        ValueError: There is no such value.
    """
    if isinstance(transform, Mapping):
        return {key: filled(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [filled(value, scope) for value in transform]
    found = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: Any = scope
    for key in found[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"there is no {found[1]}")
        value = value[key]
    return value


class HeldCall(ToolBody):
    """One call whose name is known: its text is the arguments, as JSON."""

    def __init__(self, new_call: NewCall, name: str) -> None:
        """Prepare."""
        self._start = new_call(name)
        self._is_announced = False
        self._value: JsonText | None = None
        self._is_over = self._has_arguments = self._is_noisy = False

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        out = self._announced()
        if self._value is None:
            text = text.lstrip()
            if not text:
                return out
            self._value = JsonText(text[0])
        pos = 0
        if not self._is_over:
            piece, pos = self._value.take(text, 0)
            self._is_over, self._has_arguments = pos >= 0, True
            out += [ToolArgs(self._start.index, piece)] if piece else []
        rest = text[max(pos, 0) :] if self._is_over else ""
        rest = rest if self._is_noisy else rest.lstrip()
        if rest:
            self._is_noisy = True
            out.append(Malformed("tool_call", rest))
        return out

    def close(self) -> list[ToolEvent]:
        """End the call."""
        out = self._announced()
        rest = "{}" if not self._has_arguments else self._value.rest() if self._value is not None else ""
        out += [ToolArgs(self._start.index, rest)] if rest else []
        return [*out, ToolEnd(self._start.index)]

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self._value is not None and not self._is_over and self._value.in_string

    def _announced(self) -> list[ToolEvent]:
        if self._is_announced:
            return []
        self._is_announced = True
        return [self._start]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a region's value becomes calls."""

    content: Content
    transform: Any
    each: bool = False


class RegionCalls(ToolBody):
    """Calls that are read when their region is complete; a value is of the type that the tool's schema says."""

    def __init__(
        self, new_call: NewCall, tools: Sequence[Mapping[str, Any]], captured: Mapping[str, str], form: CallForm
    ) -> None:
        """Prepare; `captured` is what the opening match did."""
        self._new_call, self._schemas = new_call, schemas_by_tool(tools)
        self._captured, self._form = captured, form
        self._parts: list[str] = []

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        self._parts.append(text)
        return []

    def close(self) -> list[ToolEvent]:
        """Read the calls; text that is none is `Malformed`."""
        text = "".join(self._parts)
        try:
            found = [self._call(value) for value in self._values(text)]
        except (ValueError, KeyError, TypeError, TimeoutError):
            return [Malformed("tool_call", text)]
        out: list[ToolEvent] = []
        for name, arguments in found:
            start = self._new_call(name)
            out += [start, ToolArgs(start.index, arguments), ToolEnd(start.index)]
        return out

    def cut(self) -> list[ToolEvent]:
        """Of a call that was cut short, what is whole; one without a name is none."""
        found = self.close()
        if not found or isinstance(found[0], Malformed):
            return []
        return [ToolArgs(event.index, event.json[:-1]) if isinstance(event, ToolArgs) else event for event in found]

    def _values(self, text: str) -> list[Any]:
        value = self._form.content.read(text)
        if not self._form.each:
            return [filled(self._form.transform, {**self._captured, "content": value})]
        if not isinstance(value, list):
            raise TypeError("it is no list")
        return [filled(self._form.transform, {**self._captured, **item}) for item in value]

    def _call(self, value: Any) -> tuple[str, str]:
        function = value["function"] if isinstance(value.get("function"), Mapping) else value
        name, arguments = function["name"], function.get("arguments")
        if not isinstance(name, str) or not name:
            raise ValueError("it has no name")
        if not isinstance(arguments, Mapping):
            return name, "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
        schema = self._schemas.get(name)
        known = properties_of(schema)
        pairs = [
            f"{json.dumps(key, ensure_ascii=False)}: "
            + (
                value_text(each, types_of(known.get(key), schema))
                if isinstance(each, str) and self._form.content.name != "json"
                else json.dumps(each, ensure_ascii=False)
            )
            for key, each in arguments.items()
        ]
        return name, "{" + ", ".join(pairs) + "}"
