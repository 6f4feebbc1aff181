r"""`deepseek-v3`: DeepSeek-V3.1, V3.2 and later hybrids, with the template's switch `thinking`.

```
Paris is the capital.</think>The capital of France is Paris.
```

The chat template appends `<｜Assistant｜></think>` when thinking is off, which is the default, and
`<｜Assistant｜><think>` when `thinking` is true; older revisions close with `<think></think>`. No newlines stand around
the markers.

Defined by the `chat_template` of deepseek-ai/DeepSeek-V3.1 and the encoding of deepseek-ai/DeepSeek-V3.2.
"""

# ruff: noqa: RUF002 - the markers are written with a full-width bar

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class DeepSeekV3(ReasoningParser):
    """Thinking between `<think>`, in the prompt if at all, and `</think>`."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(
            reasoning=Markers("<think>", "</think>", after_start="", before_end="", after_end="", ended_by_tools=True)
        )
