r"""`minimax-m3`: MiniMax-M3.

```
<mm:think>Paris is the capital.</mm:think>The capital of France is Paris.
```

The model opens thinking, or writes the bare end marker. No newlines stand around the markers.

Defined by the `chat_template` of MiniMaxAI/MiniMax-M3.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers
from dovetail_parsers.reasoning.between import Between


class MiniMaxM3(Between):
    """Thinking between `<mm:think>` and `</mm:think>`."""

    markers = Markers("<mm:think>", "</mm:think>", "", "", "", ended_by_tools=True)
