r"""`qwen3-coder`: Qwen3-Coder, Qwen3.5 and others with the same tags, such as Nemotron 3 and Step-3.5.

```
<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
```

Values are text; the tool's schema says which of them are not strings. One newline on either side of a value belongs to
the tags. Models leave `<tool_call>` out at times, and the closing tags.

Defined by the `chat_template` of Qwen/Qwen3-Coder-480B-A35B-Instruct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, NewCall, TemplateView, ToolBody, ToolFormat
from dovetail.contracts.tools import ToolParser
from dovetail.text.tool_calls.call_grammar import calls_grammar, name_of, tagged_arguments
from dovetail.text.tool_calls.tagged_calls import TaggedCalls, Tags

TAGS = Tags(
    call=("<function=", ">"),
    call_end="</function>",
    key=("<parameter=", ">"),
    value_end="</parameter>",
    newlines=True,
)


class Qwen3Coder(ToolParser):
    """Calls as tags between `<tool_call>` and `</tool_call>`."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""

        def body(new_call: NewCall) -> ToolBody:
            return TaggedCalls(new_call, TAGS, tools)

        return replace(spec, tools=ToolFormat("<tool_call>", "</tool_call>", body=body, also=(TAGS.call[0],)))

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Calls as the template writes them."""
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (
                f"<tool_call>\n<function={name_of(tool)}>\n",
                tagged_arguments(tool, TAGS),
                "</function>\n</tool_call>",
            ),
            separator="\n",
            trigger="<tool_call>",
        )

    def detect(self, template: TemplateView) -> float:
        """The tags of functions."""
        source = template.source
        return 0.95 if "<tool_call>" in source and "<function=" in source else 0.0
