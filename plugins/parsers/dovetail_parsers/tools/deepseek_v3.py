r"""`deepseek-v3`: DeepSeek-V3, V3-0324 and R1-0528.

```
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>…<｜tool▁call▁end｜><｜tool▁calls▁end｜>
```

One section holds all calls. Between name and arguments stands a fence, which models leave out at times.

Defined by the `chat_template` of deepseek-ai/DeepSeek-R1-0528 and DeepSeek-V3-0324.
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

_HEAD = re.compile(r"(?:\s*\w*\s*<｜tool▁sep｜>)?\s*([\w.:/\-]+)[\s`]*")


def read_head(text: str) -> Head | None:
    """Read `function<｜tool▁sep｜>NAME`; the type may be missing."""
    found = _HEAD.fullmatch(text)
    return None if found is None else (found[1], None)


def body(new_call: NewCall) -> ToolBody:
    """Make the reader of a section."""
    return HeadedCalls(
        new_call,
        read_head=read_head,
        stops=("```json",),
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
    )


class DeepSeekV3(ToolParser):
    """Calls with fenced JSON between DeepSeek's markers."""

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
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name_of(tool)}\n```json\n",
                json_arguments(tool),
                "\n```<｜tool▁call▁end｜>",
            ),
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            separator="\n",
            trigger="<｜tool▁calls▁begin｜>",
        )

    def detect(self, template: TemplateView) -> float:
        """DeepSeek's markers with a fence."""
        source = template.source
        return 0.9 if "<｜tool▁calls▁begin｜>" in source and "```json" in source else 0.0
