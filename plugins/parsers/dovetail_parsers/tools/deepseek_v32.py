r"""`deepseek-v32`: DeepSeek-V3.2.

```
<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
```

Each tag is several tokens, of which `｜DSML｜` is one of its own. `string` says whether a value is text or JSON.

Defined by `encoding/encoding_dsv32.py` of deepseek-ai/DeepSeek-V3.2.
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
from dovetail.text.call_grammar import calls_grammar, name_of, tagged_arguments
from dovetail.text.tagged_calls import TaggedCalls, Tags

_KEY = re.compile(r"(.*?)\"(?:\s+string=\"(true|false)\")?\s*", re.DOTALL)


def read_key(text: str) -> tuple[str, bool | None]:
    """Read `city" string="true"`."""
    found = _KEY.fullmatch(text)
    if found is None:
        return text.strip().strip('"'), None
    return found[1], None if found[2] is None else found[2] == "true"


TAGS = Tags(
    call=('<｜DSML｜invoke name="', '">'),
    call_end="</｜DSML｜invoke>",
    key=('<｜DSML｜parameter name="', ">"),
    value_end="</｜DSML｜parameter>",
    read_key=read_key,
)


class DeepSeekV32(ToolParser):
    """Calls as DSML tags."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""

        def body(new_call: NewCall) -> ToolBody:
            return TaggedCalls(new_call, TAGS, tools)

        tools_format = ToolFormat(
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            body=body,
            before_start="\n\n",
            also=(TAGS.call[0],),
            inner=("｜DSML｜",),
        )
        return replace(spec, tools=tools_format)

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Calls as the encoding writes them, in one section."""

        def key(name: str, is_string: bool) -> str:
            return f'{name}" string="{"true" if is_string else "false"}"'

        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (
                f'<｜DSML｜invoke name="{name_of(tool)}">\n',
                tagged_arguments(tool, TAGS, key=key),
                "</｜DSML｜invoke>\n",
            ),
            section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
            trigger="<｜DSML｜function_calls>",
        )

    def detect(self, template: TemplateView) -> float:
        """The tags."""
        return 0.95 if "｜DSML｜" in template.source else 0.0
