r"""`mistral`: Mistral and Magistral models, both ways in which they write calls.

```
[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}
```

Tokenizers up to version 7 write a JSON list, in which an id may stand behind the arguments (it is not used: the call
has been announced by then). Later ones write a head and repeat `[TOOL_CALLS]` for each call; the id may be missing.

Defined by mistral-common, `tokens/tokenizers/instruct.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail_parsers.families.headed_calls import Head, HeadedCalls
from dovetail_parsers.tools.either import Either
from dovetail_parsers.tools.sections import Written, WrittenCalls

_HEAD = re.compile(r"\s*([\w.:/\-]+?)(?:\[CALL_ID\]([\w\-]*))?\s*")


def read_head(text: str) -> Head | None:
    """Read `NAME[CALL_ID]ID`; the id may be missing."""
    found = _HEAD.fullmatch(text)
    return None if found is None else (found[1], found[2] or None)


def _body(new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
    """Read a JSON list, or calls with heads."""
    headed = partial(HeadedCalls, new_call, read_head=read_head, stops=("[ARGS]",), tools=tools)
    return Either("[{", partial(JsonCalls, new_call, tools=tools), headed, skipped=" \t\r\n")


class MistralTools(WrittenCalls):
    """Calls behind `[TOOL_CALLS]`."""

    trigger = "[TOOL_CALLS]"

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""
        body, inner = partial(_body, tools=tools), ("[ARGS]", "[CALL_ID]")
        tools_format = ToolFormat("[TOOL_CALLS]", "", body=body, before_start="", inner=inner)
        return replace(spec, tools=tools_format)

    def call(self, tool: Tool) -> Written:
        """A call in the later way, without an id."""
        return f"[TOOL_CALLS]{name_of(tool)}[ARGS]", json_arguments(tool), ""
