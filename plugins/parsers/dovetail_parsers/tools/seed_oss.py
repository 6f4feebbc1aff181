r"""`seed-oss`: Seed-OSS.

```
<seed:tool_call>
<function=get_weather>
<parameter=city>Paris</parameter>
</function>
</seed:tool_call>
```

One call per section. Values are text; the tool's schema says which of them are not strings.

Defined by the `chat_template` of ByteDance-Seed/Seed-OSS-36B-Instruct.
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
)


class SeedOss(ToolParser):
    """Calls as tags between Seed's markers."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""

        def body(new_call: NewCall) -> ToolBody:
            return TaggedCalls(new_call, TAGS, tools)

        return replace(spec, tools=ToolFormat("<seed:tool_call>", "</seed:tool_call>", body=body, also=(TAGS.call[0],)))

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Calls as the template writes them."""
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (
                f"<seed:tool_call>\n<function={name_of(tool)}>\n",
                tagged_arguments(tool, TAGS),
                "</function>\n</seed:tool_call>",
            ),
            separator="\n",
            trigger="<seed:tool_call>",
        )

    def detect(self, template: TemplateView) -> float:
        """The section's marker."""
        return 0.95 if "seed:tool_call" in template.source else 0.0
