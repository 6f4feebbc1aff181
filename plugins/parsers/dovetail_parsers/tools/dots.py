r"""`dots`: dots.llm.

```
<dots_function_call>
<invoke name=get_weather>
<parameter name=city>Paris</parameter>
</invoke>
</dots_function_call>
```

One section holds all calls. Quotes around names are optional. Some replies have `{"name": …, "arguments": …}` in it.

Defined by the `chat_template` of rednote-hilab/dots.llm2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.output import NewCall, ToolBody
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.families.tagged_calls import TaggedCalls
from dovetail_parsers.tools.either import Either
from dovetail_parsers.tools.sections import TagSection


def unquoted(text: str) -> str:
    """Read a name with or without quotes."""
    return text.strip().strip("\"'")


class DotsTools(TagSection):
    """Calls as tags between markers."""

    start, end = "<dots_function_call>", "</dots_function_call>"
    before = "\n"
    tags = Tags(
        call=("<invoke name=", ">"),
        call_end="</invoke>",
        key=("<parameter name=", ">"),
        value_end="</parameter>",
        read_name=unquoted,
        read_key=lambda text: (unquoted(text), None),
    )

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read tags, or JSON."""
        return Either("{", lambda: JsonCalls(new_call, tools=tools), lambda: TaggedCalls(new_call, self.tags, tools))
