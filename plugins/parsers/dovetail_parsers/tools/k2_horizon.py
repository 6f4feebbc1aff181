r"""`k2-horizon`: K2 Horizon (K2-V3).

```
<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>Paris</ifm|arg_value>
</ifm|tool_call></ifm|tool_calls>
```
(without the line break). One section holds all calls. A key may be followed by `<ifm|arg_type>…</ifm|arg_type>`; a call
may be a JSON object instead. The template's `tool_call_format` chooses; all three are read.

Defined by the description of the format in vLLM's `tool_parsers/k2_horizon_tool_parser.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.output import NewCall, ToolBody
from dovetail.sdk.formats.call_grammar import Tool, name_of, tagged_arguments
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.families.tagged_calls import TaggedCalls
from dovetail_parsers.tools.either import Either
from dovetail_parsers.tools.per_call import PerCall
from dovetail_parsers.tools.sections import Section, Written

_KEY = re.compile(
    r"\s*(.*?)\s*(?:</ifm\|arg_key>)?\s*(?:<ifm\|arg_type>\s*(\w*(?:\[[\w\[\], |]*\])?)\s*</ifm\|arg_type>)?\s*",
    re.DOTALL,
)


def read_key(text: str) -> tuple[str, bool | None]:
    """Read a key, and its type if it has one."""
    found = _KEY.fullmatch(text)
    if found is None:
        return text.strip(), None
    base = (found[2] or "").partition("[")[0].lower()
    return found[1], None if base in ("", "any") else base in ("string", "str")


TAGS = Tags(key=("<ifm|arg_key>", "<ifm|arg_value>"), value_end="</ifm|arg_value>", read_key=read_key)


class K2HorizonTools(Section):
    """Calls as keys and values, or as JSON, in one section."""

    start, end = "<ifm|tool_calls>", "</ifm|tool_calls>"
    also = ("<ifm|tool_call>",)
    inner = (
        "<ifm|tool_call>",
        "</ifm|tool_call>",
        "<ifm|arg_key>",
        "</ifm|arg_key>",
        "<ifm|arg_type>",
        "</ifm|arg_type>",
        "<ifm|arg_value>",
        "</ifm|arg_value>",
    )
    trigger, around, between = start, (start, end), "\n"

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read each call by how it begins."""

        def one() -> ToolBody:
            return Either("{", lambda: JsonCalls(new_call, tools=tools), lambda: TaggedCalls(new_call, TAGS, tools))

        return PerCall(one, "<ifm|tool_call>", "</ifm|tool_call>")

    def call(self, tool: Tool) -> Written:
        """As the template writes it where no other form is asked for."""

        def key(name: str, is_string: bool) -> str:
            return f"{name}</ifm|arg_key>"

        arguments = tagged_arguments(tool, TAGS, key=key, behind_value="", section_end="</ifm|tool_call")
        return f"<ifm|tool_call>{name_of(tool)}", arguments, "</ifm|tool_call>"
