r"""`gigachat3`: GigaChat 3 and 3.1.

```
<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}
```

GigaChat 3 begins a message of its own, `function call<|role_sep|>` and a newline. One call per reply.

Defined by the `chat_template` of ai-sage/GigaChat3-10B-A1.8B and GigaChat3.1-10B-A1.8B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.output import FormatSpec
from dovetail_parsers.tools.sections import JsonSection


class GigaChat3(JsonSection):
    """A call as an object behind a marker."""

    start = "<|function_call|>"
    before = "\n\n"
    starts = ("function call<|role_sep|>",)
    inner = ("<|role_sep|>", "<|message_sep|>")
    ignored = ("function call<|role_sep|>", "<|message_sep|>")
    listed = False

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers; what ends the message before a call is none of it."""
        return replace(super().extend(spec, tools), dropped=(*spec.dropped, "<|message_sep|>"))
