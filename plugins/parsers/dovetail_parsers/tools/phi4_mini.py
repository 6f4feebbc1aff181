r"""`phi4-mini-json`: Phi-4-mini-instruct.

```
functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
```

The marker is plain text; nothing closes the list.

Defined by the model card of microsoft/Phi-4-mini-instruct (function calling).
"""

from __future__ import annotations

from dovetail_parsers.tools.sections import JsonSection


class Phi4Mini(JsonSection):
    """Calls as a list behind a word."""

    start = "functools"
