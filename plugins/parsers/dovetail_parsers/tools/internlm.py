r"""`internlm`: InternLM2, 2.5 and 3, Intern-S1.

```
<|action_start|><|plugin|>
{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>
```

One call per section; a space may stand between the markers.

Defined by the `chat_template` of internlm/internlm2_5-7b-chat and docs/tool_calling of internlm/Intern-S1.
"""

from __future__ import annotations

from dovetail_parsers.tools.sections import JsonSection


class InternLm(JsonSection):
    """Calls as an object between markers."""

    start, end = "<|action_start|>", "<|action_end|>"
    keys = ("name", "parameters")
    listed = False
    written = ("<|plugin|>\n", "")
    inner = ("<|plugin|>",)
    ignored = ("<|plugin|>",)
