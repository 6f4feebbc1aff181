r"""`hy-v3`: Hunyuan 3 and 4 (Hy3, Hy4).

```
<think>Paris is the capital.</think>The capital of France is Paris.
```

Every marker of a model may end in a word of its own, `<think:opensource>`: it is read off the template, which appends
an empty thought unless thinking is asked for.

Defined by the `chat_template` of tencent/Hy3.
"""

from __future__ import annotations

import re

from dovetail.contracts.output import FormatSpec, Markers, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser

_WORD = re.compile(r"<think(:\w+)>")


class HunyuanReasoning(ReasoningParser):
    """Thinking between `<think>` and `</think>`, with the model's word."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        found = _WORD.search(template.source)
        word = found[1] if found else ""
        return FormatSpec(reasoning=Markers(f"<think{word}>", f"</think{word}>", "", "", "", ended_by_tools=True))
