r"""`cohere-command3`: Cohere Command R7B, Command A Reasoning.

```
<|START_THINKING|>Paris is the capital.<|END_THINKING|><|START_RESPONSE|>It is Paris.<|END_RESPONSE|>
```

The template appends the start marker, or an empty thought. The answer stands between markers too, also of models that
do not think.

Defined by the `chat_template` of CohereLabs/command-a-reasoning-08-2025 and c4ai-command-r7b-12-2024.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers
from dovetail_parsers.reasoning.between import Between

THINKING = Markers("<|START_THINKING|>", "<|END_THINKING|>", "", "", "", ended_by_tools=True, ended_by_answer=True)


class CohereCommand3(Between):
    """Thinking and answer between markers."""

    markers = THINKING
    answer = Markers("<|START_RESPONSE|>", "<|END_RESPONSE|>", "", "", "")
