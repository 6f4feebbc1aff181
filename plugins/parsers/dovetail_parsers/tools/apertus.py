r"""`apertus`: Apertus-8B and -70B Instruct.

```
<|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>
```

The key of an object is the name, its value the arguments. One list holds all calls.

Defined by the `chat_template` of swiss-ai/Apertus-8B-Instruct-2509.
"""

from __future__ import annotations

from dovetail_parsers.tools.sections import JsonSection


class Apertus(JsonSection):
    """Calls as a list of objects with one key."""

    start, end = "<|tools_prefix|>", "<|tools_suffix|>"
    keys = ("", "")
