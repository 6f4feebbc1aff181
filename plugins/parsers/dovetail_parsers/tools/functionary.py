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
from dovetail.contracts.reasoning import FormatSpec, TemplateView
from dovetail.contracts.tools import ToolFormat, ToolParser
from dovetail.text.call_grammar import calls_grammar, json_arguments, name_of
from dovetail.text.reply_grammar import Tools
from dovetail_parsers.functionary import ALL, FunctionaryParser, Known, knows


class Functionary(ToolParser):
    """Calls as messages to a tool."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say which calls are looked for; the machine knows where."""
        names = frozenset(str(tool.get("function", {}).get("name")) for tool in tools)
        return replace(spec, machine=FunctionaryParser, tools=ToolFormat(">>>", "", body=Known(names), before_start=""))

    def grammar(self, tools: Tools, choice: Any, strict: bool, parallel: bool) -> GrammarSpec | None:
        """The whole reply: calls, with `auto` also an answer before them or alone."""
        answer = {"type": "tag", "begin": f"{ALL}\n", "content": {"type": "any_text"}, "end": ""}
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (f"{name_of(tool)}\n", json_arguments(tool), ""),
            separator=">>>",
            trigger=">>>",
            instead=answer,
        )

    def detect(self, template: TemplateView) -> float:
        """What the template says of recipients."""
        return 0.95 if knows(template) else 0.0
