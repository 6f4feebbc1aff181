r"""`muse`: tool calls of Muse Spark and Muse Glimmer, see `dovetail_parsers.muse`.

```
 to=get_weather<|message|><atem:function_calls>
<atem:invoke name="get_weather">
<atem:parameter name="city">Paris</atem:parameter>
</atem:invoke>
</atem:function_calls><|eot|>
```

Defined by the `chat_template` of Muse Glimmer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, name_of, tagged_arguments
from dovetail.sdk.formats.reply_grammar import answer_message, other_messages
from dovetail_parsers.families.marker_filter import MarkerFilter
from dovetail_parsers.families.tagged_calls import TaggedCalls
from dovetail_parsers.muse import AROUND, MESSAGES, TAGS, MuseParser
from dovetail_parsers.tools.sections import Written, WrittenCalls


class MuseTools(WrittenCalls):
    """Calls as tags in messages to a tool. Brings its machine also where no reasoning parser does."""

    trigger, between = " to=", MESSAGES.ends[0] + MESSAGES.start + MESSAGES.role
    preamble, answer = other_messages(MESSAGES), answer_message(MESSAGES, {"type": "any_text"})

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say that calls are looked for; the machine knows where."""

        def body(new_call: NewCall) -> ToolBody:
            return MarkerFilter(TaggedCalls(new_call, TAGS, tools), AROUND)

        return replace(
            spec,
            machine=spec.machine or MuseParser,
            messages=spec.messages or MESSAGES,
            tools=ToolFormat(AROUND[0], AROUND[1], body=body, before_start=""),
        )

    def call(self, tool: Tool) -> Written:
        """A message with a recipient, behind thinking as the model likes."""
        header = f' to={name_of(tool)}<|message|>{AROUND[0]}\n<atem:invoke name="{name_of(tool)}">\n'
        return header, tagged_arguments(tool, TAGS, section_end=AROUND[1]), f"</atem:invoke>\n{AROUND[1]}"
