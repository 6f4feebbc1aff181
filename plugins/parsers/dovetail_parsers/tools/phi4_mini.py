r"""`phi4-mini-json`: Phi-4-mini-instruct.

```
functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
```

The marker is plain text; nothing closes the list.

Defined by the model card of microsoft/Phi-4-mini-instruct (function calling).
"""

from __future__ import annotations

from dovetail.contracts.output import TemplateView
from dovetail_parsers.tools.sections import JsonSection


class Phi4Mini(JsonSection):
    """Calls as a list behind a word."""

    start = "functools"
    knows = ("<|tool|>", "<|/tool|>")
    score = 0.7

    def detect(self, template: TemplateView) -> float:
        """The word, where a template teaches it; the markers of tools elsewhere."""
        return 0.9 if "functools[" in template.source else super().detect(template)
