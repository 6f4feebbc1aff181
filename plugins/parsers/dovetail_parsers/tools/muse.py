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

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.contracts.tools import ToolParser
from dovetail.sdk.formats.call_grammar import calls_grammar, name_of, tagged_arguments
from dovetail.sdk.formats.reply_grammar import answer_message, other_messages
from dovetail_parsers.families.marker_filter import MarkerFilter
from dovetail_parsers.families.tagged_calls import TaggedCalls
from dovetail_parsers.muse import AROUND, MESSAGES, TAGS, MuseParser


class MuseTools(ToolParser):
    """Calls as tags in messages to a tool. Brings its machine also where no reasoning parser does."""

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

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """The whole reply: thinking as the model likes, then calls, or with `auto` an answer."""
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (
                f' to={name_of(tool)}<|message|>{AROUND[0]}\n<atem:invoke name="{name_of(tool)}">\n',
                tagged_arguments(tool, TAGS, section_end=AROUND[1]),
                f"</atem:invoke>\n{AROUND[1]}",
            ),
            separator=MESSAGES.ends[0] + MESSAGES.start + MESSAGES.role,
            trigger=" to=",
            before=other_messages(MESSAGES),
            instead=answer_message(MESSAGES, {"type": "any_text"}),
        )
