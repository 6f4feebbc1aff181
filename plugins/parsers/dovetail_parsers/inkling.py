r"""Inkling's format: messages whose kind is told by a token. Read by the parsers `inkling`.

```
<|message_model|><|content_thinking|>The user asks for the weather.<|end_message|>
<|message_model|>get_weather<|content_invoke_tool_json|>{"name": "get_weather", "args": {"city": "Rome"}}<|end_message|>
```
(without the line break). The prompt may end with `<|message_model|>`. The name in a header is the tool's once more.

| token | its message is |
|---|---|
| `<|content_thinking|>` | reasoning |
| `<|content_invoke_tool_json|>` | a tool call |
| `<|content_text|>` and others | content |

A kind in the middle of a message ends it: a model may call out of its thinking.

Defined by the tml-renderers package (TMLv0), and by the description of the format in vLLM's `parser/inkling.py`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.output import FormatSpec, Messages, NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of, optional, sequence, text
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.layout import ReplyPhase
from dovetail.sdk.formats.reply_grammar import answer_message, other_messages
from dovetail_parsers.messages import Header, Mark, MessagesParser
from dovetail_parsers.reasoning.declared import Declared
from dovetail_parsers.tools.sections import Written, WrittenCalls

_NAME = re.compile(r"\s*[\w.:/\-]+\s*")
THINKING, CALL, TEXT = "<|content_thinking|>", "<|content_invoke_tool_json|>", "<|content_text|>"
NAMED = (CALL, "<|content_invoke_tool_text|>")
"""Whose headers may hold a name."""
MARKS: Mapping[str, Mark] = {
    "<|message_model|>": Mark.START,
    THINKING: Mark.BODY,
    CALL: Mark.BODY,
    TEXT: Mark.BODY,
    "<|content_invoke_tool_text|>": Mark.BODY,
    "<|content_tool_error|>": Mark.BODY,
    "<|content_xml|>": Mark.BODY,
    "<|end_message|>": Mark.END,
    "<|content_model_end_sampling|>": Mark.END,
}
MESSAGES = Messages(
    start="<|message_model|>",
    role="",
    parts=(),
    body=TEXT,
    bodies=tuple(text for text, mark in MARKS.items() if mark is Mark.BODY and text != TEXT),
    ends=("<|end_message|>", "<|content_model_end_sampling|>"),
    thinking=THINKING,
    answer="",
    thinks=r"<\|content_thinking\|>\Z",
    answers=r"\A(?!.*<\|content_)",
)


class InklingParser(MessagesParser):
    """The `OutputParser` of Inkling."""

    marks = MARKS

    def read(self, header: str, written: str, marker: str) -> Header:
        """Say what a message is."""
        _, start, name = header.rpartition("<|message_model|>")
        is_named = bool(start) and marker in NAMED and _NAME.fullmatch(name) is not None
        stray = "" if is_named or not name.strip() else written
        if marker == THINKING:
            return Header(ReplyPhase.IN, stray=stray)
        tools = self._spec.tools
        if marker == CALL and tools is not None:
            return Header(ReplyPhase.TOOL, body=tools.body, stray=stray)
        return Header(ReplyPhase.OUT, stray=stray)

    def explains(self, header: str, written: str) -> bool:
        """Whether a header is empty, or holds one name at the end of a reply that was cut."""
        _, start, name = header.rpartition("<|message_model|>")
        return not name.strip() or (bool(start) and self._is_cut and _NAME.fullmatch(name) is not None)

    def _take(self, role: enum.Enum, marker: str) -> bool:
        if role is Mark.BODY and self._phase is not ReplyPhase.OPEN and not self._is_value(role):
            self._sink_closer()
            self._end_message("")
        return super()._take(role, marker)


class InklingReasoning(Declared):
    """`inkling`: reasoning stands in messages of a kind of their own."""

    form = FormatSpec(machine=InklingParser, messages=MESSAGES)


class InklingTools(WrittenCalls):
    r"""`inkling`: tool calls of Inkling.

    ```
    <|message_model|>get_weather<|content_invoke_tool_json|>{"name": "get_weather", "args": {"city": "Rome"}}
    <|end_message|>
    ```
    (without the line break).

    Calls as JSON in messages of a kind of their own. Brings its machine also where no reasoning parser does.

    Defined by the tml-renderers package (TMLv0).
    """

    trigger, between = CALL, MESSAGES.start
    preamble = sequence(optional(text(MESSAGES.start)), other_messages(MESSAGES))
    answer = answer_message(MESSAGES, {"type": "any_text"})

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say that calls are looked for; the machine knows where."""

        def body(new_call: NewCall) -> ToolBody:
            return JsonCalls(new_call, arguments_keys=("args", "arguments", "parameters"))

        return replace(
            spec,
            machine=InklingParser,
            messages=MESSAGES,
            tools=ToolFormat(CALL, MESSAGES.ends[0], body=body, before_start=""),
        )

    def call(self, tool: Tool) -> Written:
        """A message with an object, behind thinking as the model likes."""
        name = name_of(tool)
        return f'{name}{CALL}{{"name": "{name}", "args": ', json_arguments(tool), "}" + MESSAGES.ends[0]
