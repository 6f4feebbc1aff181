r"""`xlam`: xLAM-2 and xLAM-1.

```
[{"name": "get_weather", "arguments": {"city": "Paris"}}]
```

The whole answer is a list of calls. Models put it into a fence, between `<tool_call>` or behind `[TOOL_CALLS]` at
times.

Defined by the `chat_template` and model card of Salesforce/xLAM-2-8b-fc-r.
"""

from __future__ import annotations

from dovetail_parsers.tools.sections import JsonSection


class Xlam(JsonSection):
    """Calls as a bare list."""

    starts = ("```json", "<tool_call>", "[TOOL_CALLS]")
    bare = "["
    ignored = ("```", "json", "<tool_call>", "</tool_call>", "[TOOL_CALLS]")
