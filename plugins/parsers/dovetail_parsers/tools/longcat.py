r"""`longcat`: LongCat-Flash.

```
<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</longcat_tool_call>
```

One call per section.

Defined by the `chat_template` of meituan-longcat/LongCat-Flash-Chat.
"""

from __future__ import annotations

from dovetail_parsers.tools.sections import JsonSection


class LongCat(JsonSection):
    """Calls as an object between markers."""

    start, end = "<longcat_tool_call>", "</longcat_tool_call>"
    before = "\n"
    listed = False
    written = ("\n", "\n")
