r"""`plamo3`: PLaMo 3.

```
<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>
<|plamo:begin_tool_name:plamo|>get_weather<|plamo:end_tool_name:plamo|>
<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"city": "Paris"}
<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>
```
(without the line breaks). One section holds all calls. Each marker is several tokens.

Defined by the description of the format in vLLM's `parser/plamo3.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.output import NewCall, ToolBody
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of
from dovetail_parsers.families.headed_calls import Head, HeadedCalls
from dovetail_parsers.tools.sections import Section, Written


def mark(name: str) -> str:
    """Return a marker."""
    return f"<|plamo:{name}:plamo|>"


BEGIN, END = mark("begin_tool_request"), mark("end_tool_request")
ARGUMENTS = mark("begin_tool_arguments") + "<|plamo:constrain|>json<|plamo:msg|>"
_HEAD = re.compile(
    rf"\s*{re.escape(mark('begin_tool_name'))}\s*([\w.:/\-]+)\s*(?:{re.escape(mark('end_tool_name'))})?\s*"
    rf"(?:{re.escape(mark('begin_tool_arguments'))})?\s*(?:<\|plamo:constrain\|>)?\s*(?:json)?\s*"
)


def read_head(head: str) -> Head | None:
    """Read the name and what stands before the arguments."""
    found = _HEAD.fullmatch(head)
    return None if found is None else (found[1], None)


class Plamo3Tools(Section):
    """Calls with names and JSON between PLaMo's markers."""

    start, end = mark("begin_tool_requests"), mark("end_tool_requests")
    also = (BEGIN,)
    inner = (
        BEGIN,
        END,
        mark("begin_tool_name"),
        mark("end_tool_name"),
        ARGUMENTS,
        mark("end_tool_arguments"),
    )
    ignored = (mark("end_tool_arguments"),)
    trigger, around = start, (start, end)

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read heads and JSON."""
        stops = ("<|plamo:msg|>",)
        return HeadedCalls(new_call, read_head=read_head, stops=stops, begin=BEGIN, end=END, tools=tools)

    def call(self, tool: Tool) -> Written:
        """As the template writes it."""
        header = f"{BEGIN}{mark('begin_tool_name')}{name_of(tool)}{mark('end_tool_name')}{ARGUMENTS}"
        return header, json_arguments(tool), mark("end_tool_arguments") + END
