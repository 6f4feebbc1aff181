r"""`olmo3`: Olmo 3.

```
<function_calls>
get_weather(city="Paris", days=3)
now()
</function_calls>
```

Python calls on lines of their own, between markers.

Defined by the `chat_template` of allenai/Olmo-3-7B-Instruct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.output import NewCall, ToolBody
from dovetail.sdk.formats.call_grammar import Tool, keyword_arguments, name_of
from dovetail_parsers.families.pythonic_calls import PythonicCalls
from dovetail_parsers.tools.sections import Section, Written


class Olmo3Tools(Section):
    """Calls as lines of Python between markers."""

    start, end = "<function_calls>", "</function_calls>"
    before = "\n"
    trigger, around, between = start, (f"{start}\n", f"\n{end}"), "\n"

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read Python calls."""
        return PythonicCalls(new_call, tools)

    def call(self, tool: Tool) -> Written:
        """A call with keywords, on a line of its own."""
        return f"{name_of(tool)}(", keyword_arguments(tool), ")"
