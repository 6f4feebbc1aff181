r"""`hunyuan-a13b`: Hunyuan-A13B-Instruct.

```
<think>
Paris is the capital.
</think>
<answer>
The capital of France is Paris.
</answer>
```

All markers are plain text. The template appends an empty thought when `enable_thinking` is false.

Defined by the `chat_template` of tencent/Hunyuan-A13B-Instruct.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers
from dovetail_parsers.reasoning.between import Between


class HunyuanA13b(Between):
    """Thinking and answer between tags."""

    markers = Markers("<think>", "</think>", after_end="\n", ended_by_tools=True)
    answer = Markers("<answer>", "</answer>", after_end="")
