r"""`minimax-m2`: MiniMax-M2 and M2.1.

```
Paris is the capital.
</think>

The capital of France is Paris.
```

The template appends `]~b]ai`, a newline, `<think>` and a newline: the output starts inside thinking. Text without a
prompt to look at is taken to do so.

Defined by the `chat_template` of MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, State, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class MiniMaxM2(ReasoningParser):
    """Thinking from the first token on, up to `</think>`."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(reasoning=Markers("<think>", "</think>", ended_by_tools=True), initial=State.IN)
