r"""`nemotron`: Nemotron-Nano 8B v1, 9B and 12B v2, Llama-Nemotron.

```
<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>
```

One list holds all calls.

Defined by the `chat_template` of nvidia/NVIDIA-Nemotron-Nano-9B-v2.
"""

from __future__ import annotations

from dovetail_parsers.tools.sections import JsonSection


class Nemotron(JsonSection):
    """Calls as a list between markers."""

    start, end = "<TOOLCALL>", "</TOOLCALL>"
    before = "\n"
