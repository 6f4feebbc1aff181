r"""`granite-20b-fc`: Granite-20B-FunctionCalling.

```
<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}
```

The marker is repeated for each call; nothing closes one.

Defined by the model card of ibm-granite/granite-20b-functioncalling.
"""

from __future__ import annotations

from dovetail_parsers.tools.sections import JsonSection


class Granite20bFc(JsonSection):
    """Calls as objects behind a marker each."""

    start = "<function_call>"
    before = "\n"
    listed = False
    written = (" ", "")
