r"""`solar`: Solar Open.

```
<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris"}<|tool_call:end|>
<|calls|>
```
(without the line break). One section holds all calls; their ids reach the client.

Defined by the `chat_template` of upstage/Solar-Open-100B.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.output import NewCall, ToolBody
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of, sequence, text
from dovetail_parsers.families.headed_calls import Head, HeadedCalls
from dovetail_parsers.tools.sections import Section, Written

_HEAD = re.compile(r"\s*([\w\-]*)\s*<\|tool_call:name\|>\s*([\w.:/\-]+)\s*")


def read_head(head: str) -> Head | None:
    """Read `ID<|tool_call:name|>NAME`."""
    found = _HEAD.fullmatch(head)
    return None if found is None else (found[2], found[1] or None)


class SolarTools(Section):
    """Calls with ids of their own between Solar's markers."""

    start, end = "<|tool_calls|>", "<|calls|>"
    also = ("<|tool_call:begin|>",)
    inner = ("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>")
    trigger, around = start, (start, end)

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read heads and JSON."""
        stops = ("<|tool_call:args|>",)
        return HeadedCalls(
            new_call,
            read_head=read_head,
            stops=stops,
            begin="<|tool_call:begin|>",
            end="<|tool_call:end|>",
            tools=tools,
        )

    def call(self, tool: Tool) -> Written:
        """As the template writes it, with an id."""
        number = {"type": "regex", "pattern": "[a-z0-9]{1,24}"}
        name = text(f"<|tool_call:name|>{name_of(tool)}<|tool_call:args|>")
        return "<|tool_call:begin|>", sequence(number, name, json_arguments(tool)), "<|tool_call:end|>"
