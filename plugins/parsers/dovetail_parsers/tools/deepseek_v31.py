r"""`deepseek-v31`: DeepSeek-V3.1.

```
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
<｜tool▁call▁end｜><｜tool▁calls▁end｜>
```
(without the line break). One section holds all calls.

Defined by the `chat_template` of deepseek-ai/DeepSeek-V3.1.
"""

# ruff: noqa: RUF001, RUF002 - the markers are written with full-width bars

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.reasoning import FormatSpec, TemplateView
from dovetail.contracts.tools import NewCall, ToolBody, ToolFormat, ToolParser
from dovetail.text.call_grammar import calls_grammar, json_arguments, name_of
from dovetail.text.headed_calls import Head, HeadedCalls

_HEAD = re.compile(r"\s*([\w.:/\-]+)\s*")


def read_head(text: str) -> Head | None:
    """Read the name."""
    found = _HEAD.fullmatch(text)
    return None if found is None else (found[1], None)


def body(new_call: NewCall) -> ToolBody:
    """Make the reader of a section."""
    return HeadedCalls(
        new_call,
        read_head=read_head,
        stops=("<｜tool▁sep｜>",),
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
    )


class DeepSeekV31(ToolParser):
    """Calls as name and JSON between DeepSeek's markers."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""
        tools_format = ToolFormat(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            body=body,
            before_start="",
            inner=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        )
        return replace(spec, tools=tools_format)

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Calls as the template writes them, in one section."""
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (
                f"<｜tool▁call▁begin｜>{name_of(tool)}<｜tool▁sep｜>",
                json_arguments(tool),
                "<｜tool▁call▁end｜>",
            ),
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            trigger="<｜tool▁calls▁begin｜>",
        )

    def detect(self, template: TemplateView) -> float:
        """DeepSeek's markers without a fence."""
        source = template.source
        return 0.9 if "<｜tool▁calls▁begin｜>" in source and "```json" not in source else 0.0
