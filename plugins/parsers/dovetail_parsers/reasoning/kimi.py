r"""`kimi`: Kimi-VL-Thinking and other models that write `◁think▷`.

```
◁think▷Paris is the capital.◁/think▷The capital of France is Paris.
```

The markers are plain text that tokens cut anywhere. The template appends nothing of them: the model opens thinking.

Defined by the model card and `chat_template` of moonshotai/Kimi-VL-A3B-Thinking-2506.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class Kimi(ReasoningParser):
    """Thinking between `◁think▷` and `◁/think▷`."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(
            reasoning=Markers("◁think▷", "◁/think▷", after_start="", before_end="", after_end="", ended_by_tools=True)
        )
