r"""`apertus`: Apertus-8B and -70B Instruct.

```
<|inner_prefix|>Paris is the capital.<|inner_suffix|>The capital of France is Paris.
```

The model opens thinking, or not. No newlines stand around the markers.

Defined by the `chat_template` of swiss-ai/Apertus-8B-Instruct-2509.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers
from dovetail_parsers.reasoning.between import Between


class Apertus(Between):
    """Thinking between `<|inner_prefix|>` and `<|inner_suffix|>`."""

    markers = Markers("<|inner_prefix|>", "<|inner_suffix|>", "", "", "", ended_by_tools=True)
