r"""`llama3`: Llama 3.1, 3.2 and 3.3, and Llama 4 where its template asks for JSON.

```
{"name": "get_weather", "parameters": {"city": "Paris"}}
```

The whole answer is the call, without markers, or it follows `<|python_tag|>`; several calls are separated by `;`. JSON
that begins an answer is a call only if it says so: its first key is one of a call's, and it has parameters, or the name
of a tool that was offered. Other JSON is content. Llama 4 writes `<|python_start|><|python_end|>` in front
of the call, or around it.

Defined by the `chat_template` of meta-llama/Llama-3.1-8B-Instruct and Meta's model cards (JSON based tool calling),
and that of meta-llama/Llama-4-Scout-17B-16E-Instruct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.contracts.output import FormatSpec, NewCall, TemplateView, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail_parsers.tools.sections import Written, WrittenCalls

PYTHON = ("<|python_start|>", "<|python_end|>")


class Llama3Tools(WrittenCalls):
    """Calls as bare JSON, or behind `<|python_tag|>`.

    Attributes:
        dropped: Markers that the template writes in front of a call, for nothing.
    """

    dropped: ClassVar[tuple[str, ...]] = ()
    trigger, between = '{"name": "', "; "

    def for_template(self, template: TemplateView) -> Llama3Tools:
        """Take Llama 4's markers if the template writes them."""
        return Llama4Tools() if PYTHON[1] in template.source else self

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""
        known = frozenset(str(tool.get("function", {}).get("name")) for tool in tools)

        def body(new_call: NewCall) -> ToolBody:
            return JsonCalls(new_call, known=known, tools=tools)

        return replace(
            spec,
            tools=ToolFormat("<|python_tag|>", "".join(self.dropped[1:]), body=body, before_start="", bare="{"),
            dropped=(*spec.dropped, *self.dropped),
        )

    def call(self, tool: Tool) -> Written:
        """As the template teaches it, the name first."""
        return f'{{"name": "{name_of(tool)}", "parameters": ', json_arguments(tool), "}"


class Llama4Tools(Llama3Tools):
    """As Llama 4."""

    dropped = PYTHON
