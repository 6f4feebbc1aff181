"""What tool parsers of one shape share: a grammar as data, JSON between two markers, tags between two markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.contracts.tools import ToolParser
from dovetail.sdk.formats.call_grammar import Node, Tool, calls_grammar, json_arguments, name_of, tagged_arguments
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.reply_grammar import Tools
from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.families.marker_filter import MarkerFilter
from dovetail_parsers.families.tagged_calls import TaggedCalls

Written = tuple[str, Node, str]
"""What stands before a call's arguments, the arguments, and what stands behind them."""


class WrittenCalls(ToolParser):
    """A format whose grammar follows from what it writes of a call, around all calls, and in their place.

    Attributes:
        trigger: Begins a call, or the section of calls, in free text.
        around: Stands around all calls together, where the format has such markers.
        between: Stands between two calls.
        is_parallel: Whether a reply may hold more than one call.
        preamble: Stands before the first call, for formats whose calls do not stand in free text.
        answer: May stand in place of the calls, for these formats.
    """

    trigger: ClassVar[str] = ""
    around: ClassVar[tuple[str, str] | None] = None
    between: ClassVar[str] = ""
    is_parallel: ClassVar[bool] = True
    preamble: ClassVar[Node | None] = None
    answer: ClassVar[Node | None] = None

    def call(self, tool: Tool) -> Written:
        """Write a call of a tool."""
        raise NotImplementedError

    def grammar(self, tools: Tools, choice: Any, strict: bool, parallel: bool) -> GrammarSpec | None:
        """Describe the calls as the template writes them; with an `answer`, that is the whole reply."""
        return calls_grammar(
            tools,
            choice,
            parallel and self.is_parallel,
            self.call,
            section=self.around,
            separator=self.between,
            trigger=self.trigger,
            before=self.preamble,
            instead=self.answer,
        )


class Section(WrittenCalls):
    """Calls between markers.

    Attributes:
        start: Opens a section; empty where the texts in `also` do.
        end: Closes it; empty where nothing does.
        before: Newlines in front of it.
        also: Texts that begin a call, where a model leaves `start` out.
        starts: Other texts that open a section, and are part of it.
        bare: Characters that do where an answer begins with one.
        inner: Tokens that stand inside a section.
        ignored: Texts in a section that mean nothing.
    """

    start: ClassVar[str] = ""
    end: ClassVar[str] = ""
    before: ClassVar[str] = ""
    also: ClassVar[tuple[str, ...]] = ()
    starts: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[str] = ""
    inner: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Make the reader of a section."""
        raise NotImplementedError

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""

        def body(new_call: NewCall) -> ToolBody:
            made = self.body(new_call, tools)
            return MarkerFilter(made, self.ignored, is_open=not self.end) if self.ignored else made

        section = ToolFormat(
            self.start,
            self.end,
            body=body,
            before_start=self.before,
            also=self.also,
            starts=self.starts,
            bare=self.bare,
            inner=self.inner,
        )
        return replace(spec, tools=section)


class JsonSection(Section):
    """Calls as JSON objects between markers.

    Attributes:
        keys: Of the name and of the arguments in an object. An empty name: it is the object's only key.
        listed: Whether the objects stand in one list; else each is a section of its own.
        written: What the template puts behind the start marker, and before the end marker.
    """

    keys: ClassVar[tuple[str, str]] = ("name", "arguments")
    listed: ClassVar[bool] = True
    written: ClassVar[tuple[str, str]] = ("", "")

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read one object or a list of them."""
        known = None if self.start else frozenset(str(tool.get("function", {}).get("name")) for tool in tools)
        name, arguments = self.keys
        keys = tuple(dict.fromkeys((arguments, "arguments", "parameters")))
        return JsonCalls(new_call, name_key=name or None, arguments_keys=keys, known=known, tools=tools)

    def grammar(self, tools: Tools, choice: Any, strict: bool, parallel: bool) -> GrammarSpec | None:
        """Calls as the template writes them, the name first."""
        name, arguments = self.keys
        opening, closing = self.start + self.written[0], self.written[1] + self.end
        around = ("", "") if self.listed else (opening, closing)
        begin = f'{{"{name}": "%s", "{arguments}": ' if name else '{"%s": '
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (around[0] + begin % name_of(tool), json_arguments(tool), "}" + around[1]),
            section=(f"{opening}[", f"]{closing}") if self.listed else None,
            separator=", " if self.listed else "\n",
            trigger=self.start or ("[" if self.listed else '{"'),
        )


class TagSection(Section):
    """Calls as tags between markers.

    Attributes:
        tags: The format's.
        lines: Whether tags stand on lines of their own.
        shared: Whether one section holds all calls; else each has its own.
    """

    tags: ClassVar[Tags]
    lines: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read tags."""
        return TaggedCalls(new_call, self.tags, tools)

    def key(self, name: str, is_string: bool) -> str:
        """Write what stands between the tags of a key."""
        return name

    def called(self, name: str) -> str:
        """Write what stands between the tags of a name."""
        return name

    def grammar(self, tools: Tools, choice: Any, strict: bool, parallel: bool) -> GrammarSpec | None:
        """Calls as the template writes them, in one section or each in its own."""
        tags, line = self.tags, "\n" if self.lines else ""
        around = (self.start + line, self.end) if self.start else ("", "")
        alone = ("", "") if self.shared else around
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (
                alone[0] + tags.call[0] + self.called(name_of(tool)) + tags.call[1] + line,
                tagged_arguments(tool, tags, key=self.key, behind_value=line, section_end=self.end),
                tags.call_end + line + alone[1],
            ),
            section=around if self.shared and self.start else None,
            separator="" if self.shared else line,
            trigger=self.start or tags.call[0],
        )
