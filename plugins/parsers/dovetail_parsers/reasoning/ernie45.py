r"""`ernie45`: ERNIE 4.5 Thinking.

```
<think>
Paris is the capital.
</think>

<response>
The capital of France is Paris.
</response>
```

The template appends `<think>` and a newline. The answer stands between markers too, which models leave out at times.

Defined by the `chat_template` of baidu/ERNIE-4.5-21B-A3B-Thinking.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers, State
from dovetail_parsers.reasoning.between import Between


class Ernie45(Between):
    """Thinking and answer between tags."""

    markers = Markers("<think>", "</think>", ended_by_tools=True)
    answer = Markers("<response>", "</response>", after_end="\n")
    initial = State.IN
