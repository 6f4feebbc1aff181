r"""`kimi-k2`: Kimi-K2-Thinking and later.

```
<think>Paris is the capital.</think>The capital of France is Paris.
```

The template appends `<|im_assistant|>assistant<|im_middle|>`, and the model opens thinking, or not. It may go to
`<|tool_calls_section_begin|>` without closing its thinking. No newlines stand around the markers.

Defined by the `chat_template` of moonshotai/Kimi-K2-Thinking.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class KimiK2(ReasoningParser):
    """Thinking between `<think>` and `</think>`, which a tool section ends too."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(
            reasoning=Markers(
                "<think>",
                "</think>",
                after_start="",
                before_end="",
                after_end="",
                ended_by_tools=True,
                ended_by=("<|tool_calls_section_begin|>",),
            )
        )
