r"""`gemma4`: Gemma 4.

```
<|channel>thought
Paris is the capital.
<channel|>The capital of France is Paris.
```

The template appends an empty thought when thinking is off; else the model opens it, or not.

Defined by the `chat_template` of google/gemma-4-31B-it.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers
from dovetail_parsers.reasoning.between import Between


class Gemma4(Between):
    """Thinking on the channel of thoughts."""

    markers = Markers("<|channel>thought", "<channel|>", after_end="", ended_by_tools=True)
