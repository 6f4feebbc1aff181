r"""`plamo3`: PLaMo 3.

```
<|plamo:begin_think:plamo|>Paris is the capital.<|plamo:end_think:plamo|>The capital of France is Paris.
```

Each marker is several tokens. Text without a prompt to look at is taken to start inside thinking.

Defined by the description of the format in vLLM's `parser/plamo3.py`.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers, State
from dovetail_parsers.reasoning.between import Between


class Plamo3(Between):
    """Thinking between PLaMo's markers."""

    markers = Markers("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", "", "", "", ended_by_tools=True)
    dropped = ("<|plamo:tag|>",)
    initial = State.IN
