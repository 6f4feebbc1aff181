r"""`minimax-m3`: MiniMax-M3.

```
]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>
```

A token stands before every tag, so that text in values is never one. Keys are the tags' names; an object holds
elements, a list holds `<item>`, or is an element that comes several times. Arguments come when their call is complete,
since only then their types are known. A list or an object may be JSON: no tag counts within its closed quotes.

Defined by the `chat_template` of MiniMaxAI/MiniMax-M3.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.contracts.output import Malformed, NewCall, ToolArgs, ToolBody, ToolEnd, ToolEvent
from dovetail.sdk.formats.call_grammar import Node, Tool, check_name, in_orders, name_of
from dovetail.sdk.formats.place import Place
from dovetail.sdk.formats.reply_grammar import arguments_schema
from dovetail.sdk.formats.schema_types import CONTAINERS, properties_of, schemas_by_tool, types_of, value_text
from dovetail.sdk.formats.tagged_values import tagged_value
from dovetail_parsers.families.headed_calls import is_half_a_head
from dovetail_parsers.families.tagged_calls import Quotes
from dovetail_parsers.tools.sections import Section, Written

MARK = "]<]minimax[>["
_INVOKE = re.compile(r"<invoke name=[\"']?([\w.:/\-]+)[\"']?>")
_TAG = re.compile(r"<(/?)([^<>\s]+)>")
_MAX_DEPTH = 64
"""Elements in one another; deeper ones are text."""


@dataclass(slots=True)
class Element:
    """An element that is being read; where its schema wants a string, tags in it (`inner`, those open) are text."""

    name: str
    schema: Any = None
    is_text: bool = False
    inner: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    children: list[Element] = field(default_factory=list)
    quotes: Quotes | None = None
    """Of JSON, as far as it is read; None where it is none, or is not known to be."""

    def add(self, text: str, *, is_json: bool = False) -> None:
        """Take text; `is_json`: it is JSON if it begins so."""
        if is_json and text.lstrip()[:1] in ("[", "{"):
            self.quotes = Quotes()
        self.texts.append(text)
        if self.quotes is not None:
            self.quotes.feed(text)

    @property
    def text(self) -> str:
        """What was written in it, tags that count left out."""
        if len(self.texts) > 1:
            self.texts[:] = ["".join(self.texts)]
        return self.texts[0] if self.texts else ""


class ElementCalls(ToolBody):
    """Reads calls one after the other; each comes when it is complete."""

    def __init__(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> None:
        """Prepare; `tools` as OpenAI writes them, for the types of values."""
        self._new_call = new_call
        self._schemas = schemas_by_tool(tools)
        self._names = frozenset(str(tool.get("function", tool).get("name")) for tool in tools)
        self._is_doubtful = self._doubts_names = False
        self._doubted: list[str] | None = None
        """The text of a call in doubt, behind noise or of a name that is no tool's: it counts if it ends."""
        self._parts: list[str] = []
        self._tail = ""
        self._is_behind_mark = False
        self._raw: list[str] = []
        self._call: int | None = None
        self._schema: Mapping[str, Any] | None = None
        self._stack: list[Element] = []
        self._trusts_quotes = True
        self._place = Place(behind_call=True)
        """Where the noise before a call ends: one in code is no call."""
        self._out: list[ToolEvent] = []

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text: what stands before each mark is certain."""
        seen = self._tail + text
        self._parts.append(text)
        self._tail = seen[-len(MARK) + 1 :]
        if MARK in seen:
            *pieces, last = "".join(self._parts).split(MARK)
            self._parts, self._is_behind_mark = [last], True
            for number, piece in enumerate(pieces, 1):
                self._piece(piece)
                if self.left is not None:
                    self.left = self.left[0], MARK + MARK.join([*pieces[number:], last])
                    self._parts.clear()
                    break
        return self._take_out()

    def doubt(self) -> None:
        """The first call has a tool's name, or ends the section."""
        self._is_doubtful = self._doubts_names = True

    def doubt_names(self) -> None:
        """The first call has a tool's name, or is none."""
        self._doubts_names = True

    def close(self) -> list[ToolEvent]:
        """End the section: a call that was open is complete."""
        return self._finish(is_cut=False)

    def cut(self) -> list[ToolEvent]:
        """End the section, cut short: half a tag is no content."""
        return self._finish(is_cut=True)

    def _finish(self, *, is_cut: bool) -> list[ToolEvent]:
        self._close_quotes()
        rest = "".join(self._parts)
        self._parts.clear()
        if self._doubted is not None and not rest.startswith("</invoke>"):
            self._doubted.append(MARK + rest)
        elif self._is_behind_mark and rest.startswith("<") and ">" not in rest:
            if not self._begins_tag(rest, is_cut=is_cut):
                self._unread(MARK + rest)
        else:
            if self._call is not None or (is_cut and not self._raw):
                rest = _without_half_a_mark(rest)
            self._piece(rest)
            if is_cut and self._wants_no_text():
                value = self._stack[-1]
                if value.text.endswith("]") and value.text.count("]") > value.text.count("["):
                    value.texts[:] = [value.text[:-1]]
        self._end_call()
        self._out += self._noise()
        return self._take_out()

    def _close_quotes(self) -> None:
        """Read on from the first mark within quotes that nothing closed: it counts then, and no quotes do any more."""
        value = self._stack[-1] if self._call is not None else None
        if value is None or value.quotes is None or not value.quotes.is_open or value.quotes.first is None:
            return
        text, at = value.text, value.quotes.first
        value.texts[:], value.quotes, self._trusts_quotes = [text[:at]], None, False
        for piece in text[at:].split(MARK)[1:]:
            self._piece(piece)

    def _wants_no_text(self) -> bool:
        """Whether the schema says that what was opened last is no text: then a bracket too many begins a mark."""
        names = [element.name for element in self._stack[1:]]
        if self._call is None or len(names) != 1:
            return False
        types = types_of(properties_of(self._schema).get(names[0]), self._schema)
        return bool(types) and "string" not in types

    def _begins_tag(self, rest: str, *, is_cut: bool) -> bool:
        """Whether what ends the section is half a closing tag, or half of any where the output was cut there."""
        if self._call is None:
            return is_cut and not self._raw and is_half_a_head(rest)
        tags = ("</invoke>", "</tool_call>", *(f"</{element.name}>" for element in self._stack[1:]))
        return any(tag.startswith(rest) for tag in tags) or (is_cut and is_half_a_head(rest))

    def _unread(self, text: str) -> None:
        """Take what belongs to no value: it is shown."""
        if self._call is None:
            self._raw.append(text)
        else:
            self._stack[0].texts.append(text)

    def _noise(self) -> list[ToolEvent]:
        """Return what stands outside of calls."""
        raw = "".join(self._raw)
        self._raw.clear()
        self._place = Place(behind_call=True)
        return [Malformed("tool_call", raw)] if raw else []

    def _take_out(self) -> list[ToolEvent]:
        out, self._out = self._out, []
        return out

    def _piece(self, piece: str) -> None:
        """Take what stands between two marks: a tag, and text behind it."""
        value = self._stack[-1] if self._call is not None else None
        if self._doubted is not None:
            self._doubted.append(MARK + piece)
        if value is not None and value.quotes is not None and value.quotes.is_open:
            value.quotes.note(0)
            value.add(MARK + piece)
            return
        tag = _INVOKE.match(piece) or _TAG.match(piece)
        if tag is None:
            self._text(piece)
        elif tag.re is _INVOKE and self._call is None and self._place.is_quoted:
            self._text(MARK + piece)
        elif tag.re is _INVOKE:
            if self._doubted is not None:
                self._doubted.pop()
            self._end_call()
            self._begin_call(tag[1], piece, tag.end())
        elif self._call is None:
            self._text(MARK + piece)
        elif tag[1]:
            self._close(tag[2], tag[0], piece)
        elif self._opens(tag[2]):
            self._open(tag[2], piece[tag.end() :])
        else:
            self._stack[-1].inner[tag[2]] += 1
            self._stack[-1].add(MARK + piece)

    def _begin_call(self, name: str, piece: str, at: int) -> None:
        if self._doubts_names and name not in self._names:
            if self._is_doubtful:
                self.left = ("".join(self._raw) + MARK + piece, "")
                self._raw.clear()
            else:
                self._text(MARK + piece)
            return
        self._schema = self._schemas.get(name)
        self._stack = [Element(name, self._schema, texts=[piece[at:]])]
        if self._raw or name not in self._names:
            self._call, self._doubted = -1, [MARK + piece]
            return
        start = self._new_call(name)
        self._call = start.index
        self._out += [*self._noise(), start]

    def _opens(self, name: str) -> bool:
        """Whether a tag opens an element here. A parameter that is still to come ends text that was not closed."""
        if not self._stack[-1].is_text:
            return len(self._stack) <= _MAX_DEPTH
        root = self._stack[0]
        given = {element.name for element in root.children} | {self._stack[1].name}
        if len(self._stack) != 2 or name in given or name not in properties_of(self._schema):
            return False
        self._close_last()
        return True

    def _open(self, name: str, text: str) -> None:
        parent = self._stack[-1].schema
        schema = properties_of(parent if isinstance(parent, Mapping) else None).get(name)
        if name == "item" and schema is None and isinstance(parent, Mapping):
            schema = parent.get("items")
        types = types_of(schema, self._schema)
        self._stack.append(Element(name, schema, "string" in types and not types & CONTAINERS))
        is_json = bool(types & CONTAINERS) and "string" not in types and self._trusts_quotes
        self._stack[-1].add(text, is_json=is_json)

    def _text(self, text: str) -> None:
        if self._call is not None:
            self._stack[-1].add(text)
        elif text.strip():
            self._raw.append(text)
            self._place.feed(text)

    def _close(self, name: str, tag: str, piece: str) -> None:
        """Take a closing tag; one of nothing that is open closes what was opened last, and is shown."""
        behind = piece[len(tag) :]
        if name == "invoke":
            if self._doubted is not None and self._stack[0].text.strip():  # prose between two tags
                self._end_call()
                return
            if self._doubted is not None:  # it is a call
                self._doubted = None
                start = self._new_call(self._stack[0].name)
                self._call = start.index
                self._out += [*self._noise(), start]
            self._end_call()
            self._text(behind)
            return
        names = [element.name for element in self._stack[1:]]
        if name not in names:
            last = self._stack[-1]
            if last.inner[name] > 0:
                last.inner[name] -= 1
                last.texts.append(MARK + piece)
                return
            self._unread(MARK + tag)
        while len(self._stack) > 1 and self._close_last() != name and name in names:
            pass
        self._stack[-1].add(behind)

    def _close_last(self) -> str:
        """Close the element that was opened last. Text beside its children is no part of a value: it is shown."""
        element = self._stack.pop()
        self._stack[-1].children.append(element)
        if element.children and element.text.strip():
            self._stack[0].texts.append(element.text)
        return element.name

    def _end_call(self) -> None:
        if self._doubted is not None:
            self._call, text, self._doubted = None, "".join(self._doubted), None
            self._text(text)
        if self._call is None:
            return
        while len(self._stack) > 1:
            self._close_last()
        root, self._doubts_names = self._stack[0], False
        self._out += [ToolArgs(self._call, self._members(root.children, self._schema)), ToolEnd(self._call)]
        if root.text.strip():
            self._out.append(Malformed("tool_call", root.text))
        self._call = None

    def _members(self, children: Sequence[Element], schema: Mapping[str, Any] | None) -> str:
        """Return an object of elements. Those of one name are the items of a list, unless the schema wants none."""
        known, named = properties_of(schema), dict[str, list[Element]]()
        for child in children:
            named.setdefault(child.name, []).append(child)
        pairs = []
        for name, same in named.items():
            declared = known.get(name)
            types = types_of(declared, self._schema)
            if len(same) > 1 and (not types or "array" in types):
                items = declared.get("items") if isinstance(declared, Mapping) else None
                values = ["[" + ", ".join(self._value(child, items) for child in same) + "]"]
            else:
                values = [self._value(child, declared) for child in same]
            pairs += [f"{json.dumps(name, ensure_ascii=False)}: {value}" for value in values]
        return "{" + ", ".join(pairs) + "}"

    def _value(self, element: Element, schema: Any) -> str:
        """Return an element's JSON text."""
        children = element.children
        types = types_of(schema, self._schema)
        items = schema.get("items") if isinstance(schema, Mapping) else None
        if children and all(child.name == "item" for child in children) and types != {"object"}:
            return "[" + ", ".join(self._value(child, items) for child in children) + "]"
        if children:
            return self._members(children, schema if isinstance(schema, Mapping) else None)
        if not element.text.strip() and types in ({"array"}, {"object"}):
            return "[]" if types == {"array"} else "{}"
        return value_text(element.text, types)


def _without_half_a_mark(text: str) -> str:
    """Drop the beginning of a mark from the end of a text. A single bracket may be a value's own."""
    size = next((size for size in range(len(MARK) - 1, 1, -1) if text.endswith(MARK[:size])), 0)
    return text[: len(text) - size]


class MiniMaxM3Tools(Section):
    """Calls as elements behind marks."""

    start, end = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
    also = (f"{MARK}<invoke",)
    inner = (MARK,)
    trigger, around = start, (f"{start}\n", end)

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read elements."""
        return ElementCalls(new_call, tools)

    def call(self, tool: Tool) -> Written:
        """As the template writes it; objects and lists as JSON, which the parser reads too."""
        return f'{MARK}<invoke name="{name_of(tool)}">', element_arguments(tool, MARK), f"{MARK}</invoke>\n"


_ELEMENT = re.compile(r"[^\s<>/][^\s<>]*")
"""A name that is read back in an element's tag."""


def element_arguments(tool: Tool, mark: str) -> Node:
    """Describe a call's arguments as elements, each tag behind `mark`; values that are no strings are JSON."""
    schema = arguments_schema(tool)
    parts: dict[str, Node] = {}
    for name, declared in properties_of(schema).items():
        check_name(tool, name, is_read=_ELEMENT.fullmatch(name) is not None)
        value = tagged_value(declared, schema, (mark,)).node
        parts[name] = {"type": "tag", "begin": f"{mark}<{name}>", "content": value, "end": f"{mark}</{name}>"}
    return in_orders(parts, schema)
