r"""`granite`: Granite 3.0 to 3.3.

```
<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
```

Granite 3.0 writes the marker as a token, later ones `<tool_call>` as text. Nothing closes the list.

Defined by the `chat_template` of ibm-granite/granite-3.0-8b-instruct and granite-3.3-8b-instruct.
"""

from __future__ import annotations

from dovetail_parsers.tools.sections import JsonSection


class Granite(JsonSection):
    """Calls as a list behind a marker."""

    start = "<|tool_call|>"
    starts = ("<tool_call>",)
    ignored = ("<tool_call>", "</tool_call>")
