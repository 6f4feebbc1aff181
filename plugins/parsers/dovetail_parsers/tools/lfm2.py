r"""`lfm2`: LFM2 and LFM2.5.

```
<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>
```

A list of Python calls between markers; a model that is asked to writes JSON there.

Defined by the model card of LiquidAI/LFM2-1.2B (tool use).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.output import NewCall, ToolBody
from dovetail.sdk.formats.call_grammar import Tool, keyword_arguments, name_of
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail_parsers.families.pythonic_calls import PythonicCalls
from dovetail_parsers.tools.either import Either
from dovetail_parsers.tools.sections import Section, Written


class Lfm2Tools(Section):
    """Calls as a list of Python calls between markers."""

    start, end = "<|tool_call_start|>", "<|tool_call_end|>"
    trigger, around, between = start, (f"{start}[", f"]{end}"), ", "

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read Python calls, or JSON where the list holds objects."""
        return Either("{", lambda: JsonCalls(new_call, tools=tools), lambda: PythonicCalls(new_call, tools))

    def call(self, tool: Tool) -> Written:
        """A call with keywords, in a list."""
        return f"{name_of(tool)}(", keyword_arguments(tool), ")"
