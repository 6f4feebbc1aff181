r"""`solar`: Solar Open.

```
<|think|>Paris is the capital.<|end|><|begin|>assistant<|content|>The capital of France is Paris.<|end|>
```

A message for thinking and one for the answer. The template appends `<|begin|>assistant`.

Defined by the `chat_template` of upstage/Solar-Open-100B.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers
from dovetail_parsers.reasoning.between import Between


class Solar(Between):
    """Thinking and answer in messages of their own."""

    markers = Markers("<|think|>", "<|end|>", "", "", "", ended_by_tools=True, ended_by_answer=True)
    answer = Markers("<|content|>", "<|end|>", "", "", "")
    dropped = ("<|begin|>assistant",)
