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

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.contracts.tools import ToolParser
from dovetail.sdk.formats.call_grammar import calls_grammar, json_arguments, name_of, sequence, text
from dovetail_parsers.families.headed_calls import Head, HeadedCalls

_HEAD = re.compile(r"(?:functions\.)?([\w.:/\-]+?)(?::\d+)?")


def read_head(text: str) -> Head | None:
    """Read `functions.NAME:INDEX`."""
    head = text.strip()
    found = _HEAD.fullmatch(head)
    return None if found is None else (found[1], head)


class KimiK2Tools(ToolParser):
    """Calls with ids of their own between Kimi's markers."""

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
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            body=body,
            before_start="",
            also=("<|tool_call_begin|>",),
            inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        )
        return replace(spec, tools=tools_format)

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Calls as the template writes them, in one section, each with an index in its id."""
        index = {"type": "regex", "pattern": "[0-9]{1,4}"}
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (
                f"<|tool_call_begin|>functions.{name_of(tool)}:",
                sequence(index, text("<|tool_call_argument_begin|>"), json_arguments(tool)),
                "<|tool_call_end|>",
            ),
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            trigger="<|tool_calls_section_begin|>",
        )
