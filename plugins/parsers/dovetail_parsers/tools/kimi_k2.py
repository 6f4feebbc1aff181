r"""`kimi-k2`: Kimi-K2-Instruct and Kimi-K2-Thinking.

```
<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
<|tool_call_end|><|tool_calls_section_end|>
```
(without the line break). One section holds all calls. The head is the call's id, which reaches the client as written,
since the template puts it before the tool's result.

Defined by `docs/tool_call_guidance.md` of moonshotai/Kimi-K2-Instruct.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of, sequence, text
from dovetail_parsers.families.headed_calls import Head, HeadedCalls
from dovetail_parsers.tools.sections import Written, WrittenCalls

SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_HEAD = re.compile(r"(?:functions\.)?([\w.:/\-]+?)(?::\d+)?")


def read_head(text: str) -> Head | None:
    """Read `functions.NAME:INDEX`."""
    head = text.strip()
    found = _HEAD.fullmatch(head)
    return None if found is None else (found[1], head)


class KimiK2Tools(WrittenCalls):
    """Calls with ids of their own between Kimi's markers."""

    trigger, around = SECTION[0], SECTION

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""

        def body(new_call: NewCall) -> ToolBody:
            return HeadedCalls(
                new_call,
                read_head=read_head,
                stops=("<|tool_call_argument_begin|>",),
                begin="<|tool_call_begin|>",
                end="<|tool_call_end|>",
                tools=tools,
            )

        tools_format = ToolFormat(
            *SECTION,
            body=body,
            before_start="",
            also=("<|tool_call_begin|>",),
            inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        )
        return replace(spec, tools=tools_format)

    def call(self, tool: Tool) -> Written:
        """As the template writes it, in one section, with an index in its id."""
        index = {"type": "regex", "pattern": "[0-9]{1,4}"}
        arguments = sequence(index, text("<|tool_call_argument_begin|>"), json_arguments(tool))
        return f"<|tool_call_begin|>functions.{name_of(tool)}:", arguments, "<|tool_call_end|>"
