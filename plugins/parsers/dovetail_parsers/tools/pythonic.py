r"""`pythonic`: Llama 4, Llama 3.2 in its pythonic style, ToolACE and others.

```
[get_weather(city="Paris", days=3), get_time()]
```

The whole answer is a list of calls, or it stands between `<|python_start|>` and `<|python_end|>`. Arguments are Python
literals, which become JSON; each reaches the client when it is complete. A list that is no list of calls is content.

Defined by Meta's model cards of Llama 4 (tool calling) and the model card of Team-ACE/ToolACE-2-8B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Node, Tool, keyword_arguments, name_of
from dovetail_parsers.families.pythonic_calls import PythonicCalls
from dovetail_parsers.tools.sections import Written, WrittenCalls

TEXT = r"[ \t\r\n]*([^\[ \t\r\n](.|\n)*)?"
"""An answer that is no list."""


class PythonicTools(WrittenCalls):
    """Calls as a list of Python calls."""

    trigger, around, between = "[", ("[", "]"), ", "
    answer: ClassVar[Node] = {"type": "regex", "pattern": TEXT}

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""

        def body(new_call: NewCall) -> ToolBody:
            return PythonicCalls(new_call, tools)

        return replace(
            spec, tools=ToolFormat("<|python_start|>", "<|python_end|>", body=body, before_start="", bare="[")
        )

    def call(self, tool: Tool) -> Written:
        """A call with keywords. With `auto`, an answer that begins with a bracket is a list of such calls."""
        return f"{name_of(tool)}(", keyword_arguments(tool), ")"
