r"""`minimax-m2`: MiniMax-M2 and M2.1.

```
<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
```

One section holds all calls. Values are text; the tool's schema says which of them are not strings.

Defined by the `chat_template` and `docs/tool_calling_guide.md` of MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, name_of, tagged_arguments
from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.families.tagged_calls import TaggedCalls
from dovetail_parsers.tools.sections import Written, WrittenCalls

TAGS = Tags(
    call=('<invoke name="', '">'),
    call_end="</invoke>",
    key=('<parameter name="', '">'),
    value_end="</parameter>",
)


class MiniMaxM2Tools(WrittenCalls):
    """Calls as tags between MiniMax's markers."""

    trigger, around = "<minimax:tool_call>", ("<minimax:tool_call>\n", "</minimax:tool_call>")

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""

        def body(new_call: NewCall) -> ToolBody:
            return TaggedCalls(new_call, TAGS, tools)

        return replace(
            spec, tools=ToolFormat("<minimax:tool_call>", "</minimax:tool_call>", body=body, also=(TAGS.call[0],))
        )

    def call(self, tool: Tool) -> Written:
        """As the template writes it, in one section."""
        arguments = tagged_arguments(tool, TAGS, section_end="</minimax:tool_call>")
        return f'<invoke name="{name_of(tool)}">\n', arguments, "</invoke>\n"
