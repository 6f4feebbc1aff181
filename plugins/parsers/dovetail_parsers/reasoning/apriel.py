r"""`apriel`: Apriel-1.5 and 1.6 Thinker.

```
Here are my reasoning steps:
Paris is the capital.
[BEGIN FINAL RESPONSE]
The capital of France is Paris.
```

Both markers are plain text; the template puts the first into the prompt. Text without a prompt to look at is taken to
start inside thinking.

Defined by the `chat_template` of ServiceNow-AI/Apriel-1.6-15b-Thinker.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers, State
from dovetail_parsers.reasoning.between import Between


class Apriel(Between):
    """Thinking up to `[BEGIN FINAL RESPONSE]`."""

    markers = Markers("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", after_end="\n", ended_by_tools=True)
    initial = State.IN
