r"""`hyperclova`: tool calls of HyperCLOVA X SEED Think, see `dovetail_parsers.hyperclova`.

```
 -> tool/function_call
[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|im_end|><|stop|>
```

Defined by the `chat_template` of naver-hyperclovax/HyperCLOVAX-SEED-Think-14B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.output import FormatSpec, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of, optional, sequence, text
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail_parsers.hyperclova import CALLS, END, ROLE, START, THINKING, HyperClovaParser
from dovetail_parsers.tools.sections import Written, WrittenCalls

THOUGHT = {
    "type": "tag",
    "begin": f"{THINKING}\n",
    "content": {"type": "any_text", "excludes": [END]},
    "end": f"{END}\n{START}{ROLE}",
}


class HyperClovaTools(WrittenCalls):
    """Calls as a list in a message of its own. Brings its machine also where no reasoning parser does."""

    trigger, around, between = CALLS, (f"{CALLS}\n[", "]"), ", "
    preamble, answer = optional(THOUGHT), sequence(text("\n"), {"type": "any_text"})

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say that calls are looked for; the machine knows where."""
        return replace(spec, machine=HyperClovaParser, tools=ToolFormat(CALLS, END, body=JsonCalls, before_start=""))

    def call(self, tool: Tool) -> Written:
        """An object in the list, the name first; thinking may stand before it."""
        return f'{{"name": "{name_of(tool)}", "arguments": ', json_arguments(tool), "}"
