r"""`cohere-command`: Cohere Command R7B, Command A and Command 4.

```
<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
]<|END_ACTION|>
```

One list holds all calls. Their ids are numbers that mean nothing beyond the reply.

Defined by the `chat_template` of CohereLabs/c4ai-command-r7b-12-2024 and CohereLabs/command-a-reasoning-08-2025.
"""

from __future__ import annotations

from dovetail_parsers.tools.sections import JsonSection


class CohereCommand(JsonSection):
    """Calls as a list of actions."""

    start, end = "<|START_ACTION|>", "<|END_ACTION|>"
    keys = ("tool_name", "parameters")
