r"""`step3`: Step3 and Step-3.5.

```
Paris is the capital.
</think>

The capital of France is Paris.
```

The template appends `<think>` and a newline: the output starts inside thinking. Text without a prompt to look at is
taken to do so.

Defined by the `chat_template` of stepfun-ai/step3.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, State, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class Step3(ReasoningParser):
    """Thinking from the first token on, up to `</think>`."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(reasoning=Markers("<think>", "</think>", ended_by_tools=True), initial=State.IN)
