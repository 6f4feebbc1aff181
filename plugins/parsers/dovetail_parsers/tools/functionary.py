r"""`functionary`: tool calls of Functionary, see `dovetail_parsers.functionary`.

```
get_weather
{"city": "Paris"}>>>now
{}
```

Defined by the `chat_template` of meetkai/functionary-medium-v3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, ToolFormat
from dovetail.contracts.tools import ToolParser
from dovetail.sdk.formats.call_grammar import Node, calls_grammar, json_arguments, name_of, sequence
from dovetail.sdk.formats.reply_grammar import Tools
from dovetail_parsers.functionary import ALL, FunctionaryParser, FunctionNames


class FunctionaryTools(ToolParser):
    """Calls as messages to a tool."""

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
