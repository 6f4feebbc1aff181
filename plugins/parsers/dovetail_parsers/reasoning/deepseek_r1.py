r"""`deepseek-r1`: DeepSeek-R1, R1-0528 and the R1 distillations.

```
<think>
Paris is the capital.
</think>

The capital of France is Paris.
```

The chat template appends `<｜Assistant｜><think>\n`, so that the output starts inside thinking and the start marker
is missing from it; a model that writes it again is understood. Older templates append `<｜Assistant｜>` alone, and the
model opens thinking itself, or not. Text without a prompt to look at is taken to start inside thinking.

Defined by the `chat_template` in the tokenizer_config.json of deepseek-ai/DeepSeek-R1 and DeepSeek-R1-0528.
"""

# ruff: noqa: RUF002 - the markers are written with a full-width bar

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, State, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class DeepSeekR1(ReasoningParser):
    """Thinking between `<think>`, mostly in the prompt, and `</think>`."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(reasoning=Markers("<think>", "</think>", ended_by_tools=True), initial=State.IN)
