r"""`hunyuan-a13b`: Hunyuan-A13B-Instruct, and others with a list between `<tool_calls>`, such as Jamba and MiniMax-M1.

```
<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>
```

One section holds all calls, in a list or on lines of their own.

Defined by the `chat_template` of tencent/Hunyuan-A13B-Instruct, ai21labs/AI21-Jamba-Mini-1.6 and
MiniMaxAI/MiniMax-M1-80k.
"""

from __future__ import annotations

from dovetail_parsers.tools.sections import JsonSection


class HunyuanA13b(JsonSection):
    """Calls as JSON in one section."""

    start, end = "<tool_calls>", "</tool_calls>"
    before = "\n"
