r"""`inkling`: tool calls of Inkling, see `dovetail_parsers.inkling`.

```
<|message_model|>get_weather<|content_invoke_tool_json|>{"name": "get_weather", "args": {"city": "Rome"}}<|end_message|>
```

Defined by the tml-renderers package (TMLv0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of, optional, sequence, text
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.reply_grammar import answer_message, other_messages
from dovetail_parsers.inkling import CALL, MESSAGES, InklingParser
from dovetail_parsers.tools.sections import Written, WrittenCalls


class InklingTools(WrittenCalls):
    """Calls as JSON in messages of a kind of their own. Brings its machine also where no reasoning parser does."""

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
