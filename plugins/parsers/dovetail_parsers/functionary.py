r"""Functionary's format: messages behind `>>>`, each to a recipient. Read by the parsers `functionary`.

```
all
Let me look.>>>get_weather
{"city": "Paris"}
```

The prompt ends with `>>>`. What is sent to `all` is content, to a tool its arguments. Behind `>>>` stands `all` or the
name of a tool that was offered, and a line break; else it is text, as in a listing of Python. So it is in code, and
behind an answer where no `{` follows.

Defined by the `chat_template` of meetkai/functionary-medium-v3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import (
    Event,
    FormatSpec,
    Malformed,
    NewCall,
    ToolArgs,
    ToolBody,
    ToolEnd,
    ToolEvent,
    ToolFormat,
)
from dovetail.contracts.tools import ToolParser
from dovetail.sdk.formats.call_grammar import Node, calls_grammar, json_arguments, name_of, sequence
from dovetail.sdk.formats.layout import ReplyPhase
from dovetail.sdk.formats.reply_grammar import Tools
from dovetail_parsers.families.headed_calls import Head, HeadedCalls
from dovetail_parsers.messages import Header, Mark, MessagesParser, Strings
from dovetail_parsers.reasoning.declared import Declared

MARKS: Mapping[str, Mark] = {">>>": Mark.START, "\n": Mark.BODY}
ALL = "all"


@dataclass(frozen=True)
class FunctionNames:
    """The `ToolFormat.body` of Functionary: its machine reads calls itself and asks for the tools' names alone."""

    names: frozenset[str]

    def __call__(self, new_call: NewCall) -> ToolBody:
        """Make a reader of a call alone, as for any other format."""
        return HeadedCalls(new_call, read_head=self._head, stops=("\n",), begin=">>>")

    def _head(self, head: str) -> Head | None:
        return (head.strip(), None) if head.strip() in self.names else None


class BehindAnswer(ToolBody):
    """Arguments of a call that follows an answer, which may only name it: without a `{` all of it is text.

    Attributes:
        lead: The header and what follows it, as long as it is not known to be a call.
        is_text: It is none.
    """

    def __init__(self, new_call: NewCall, name: str, header: str) -> None:
        """Prepare; `header` is what stands before the arguments."""
        self._new_call, self._name, self._header_len = new_call, name, len(header)
        self.lead, self.is_text = header, False
        self._call: int | None = None
        self._strings = Strings()

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        if self._call is not None:
            self._strings.take(text)
            return [ToolArgs(self._call, text)]
        self.lead += text
        arguments = self.lead[self._header_len :].lstrip()
        self.is_text = arguments[:1] not in ("", "{")
        if self.is_text or not arguments:
            return []
        start = self._new_call(self._name)
        self._call = start.index
        self._strings.take(arguments)
        return [start, ToolArgs(start.index, arguments)]

    def close(self) -> list[ToolEvent]:
        """End the message."""
        return [Malformed("tool_call", self.lead)] if self._call is None else [ToolEnd(self._call)]

    def cut(self) -> list[ToolEvent]:
        """End the message, cut short."""
        return [] if self._call is None else [ToolEnd(self._call)]

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a string of the arguments."""
        return self._strings.inside


class FunctionaryParser(MessagesParser):
    """The `OutputParser` of Functionary."""

    marks = MARKS
    is_spelled = True
    _has_answered = False
    """Whether the message before was an answer."""

    def read(self, header: str, written: str, marker: str) -> Header:
        """Say what a message is."""
        name = header.removeprefix(">>>")
        if name == ALL:
            return Header(ReplyPhase.OUT)
        if name in self._names and self._has_answered:
            return Header(ReplyPhase.TOOL, body=lambda new_call: BehindAnswer(new_call, name, written + marker))
        if name in self._names:
            return Header(ReplyPhase.TOOL, name)
        return Header(ReplyPhase.OUT, stray=written + marker)

    def finish(self, reason: str) -> list[Event]:
        """As in any format of messages."""
        self._is_cut = reason != "stop"
        return super().finish(reason)

    def _end_message(self, marker: str) -> None:
        self._has_answered = self._phase is ReplyPhase.OUT and not self._priming
        super()._end_message(marker)

    def _begin_message(self, marker: str) -> None:
        place = self.place
        super()._begin_message(marker)
        if isinstance(self._body, BehindAnswer):
            self.place = place

    def _sink_call(self, text: str) -> None:
        super()._sink_call(text)
        if isinstance(self._body, BehindAnswer) and self._body.is_text:
            text, self._body, self._passing = self._body.lead, None, None
            self._phase = ReplyPhase.OUT
            self._sink(text)

    def explains(self, header: str, written: str) -> bool:
        """Whether a header is the beginning of a recipient, and not one that an answer only names at its end."""
        name = header.removeprefix(">>>")
        return (self._is_cut or not self._has_answered) and any(known.startswith(name) for known in (ALL, *self._names))

    @property
    def _names(self) -> frozenset[str]:
        body = None if self._spec.tools is None else self._spec.tools.body
        return body.names if isinstance(body, FunctionNames) else frozenset()


class FunctionaryReasoning(Declared):
    """`functionary`: models that do not think; what is sent to `all` is the answer, also of requests without tools."""

    form = FormatSpec(machine=FunctionaryParser)


class FunctionaryTools(ToolParser):
    r"""`functionary`: tool calls of Functionary.

    ```
    get_weather
    {"city": "Paris"}>>>now
    {}
    ```

    Calls as messages to a tool.

    Defined by the `chat_template` of meetkai/functionary-medium-v3.2.
    """

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say which calls are looked for; the machine knows where."""
        names = frozenset(str(tool.get("function", {}).get("name")) for tool in tools)
        return replace(
            spec, machine=FunctionaryParser, tools=ToolFormat(">>>", "", body=FunctionNames(names), before_start="")
        )

    def grammar(self, tools: Tools, choice: Any, strict: bool, parallel: bool) -> GrammarSpec | None:
        """The whole reply: calls, with `auto` an answer before them or alone; in it stand no other calls."""
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (f"{name_of(tool)}\n", json_arguments(tool), ""),
            separator=">>>",
            trigger=">>>",
            instead=_answer(tools, parallel),
        )


def _answer(tools: Tools, parallel: bool) -> Node:
    """Describe an answer and the calls that may follow it."""

    def call(tool: Mapping[str, Any], content: Node) -> dict[str, Any]:
        return {"type": "tag", "begin": f">>>{name_of(tool)}\n", "content": content, "end": ""}

    arguments = [json_arguments(tool) for tool in tools]
    calls = [call(tool, content) for tool, content in zip(tools, arguments, strict=True)]
    more: Node = {"type": "tags_with_separator", "tags": calls, "separator": ""}
    first = [
        call(tool, sequence(each, more) if parallel else each) for tool, each in zip(tools, arguments, strict=True)
    ]
    content = {
        "type": "triggered_tags",
        "triggers": [each["begin"] for each in first],
        "tags": [{key: value for key, value in each.items() if key != "type"} for each in first],
        "stop_after_first": True,
    }
    return {"type": "tag", "begin": f"{ALL}\n", "content": content, "end": ""}
