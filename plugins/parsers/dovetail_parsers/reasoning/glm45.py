r"""`glm45`: GLM-4.5, 4.6 and 4.7.

```
<think>Paris is the capital.</think>
The capital of France is Paris.
```

The template of 4.5 and 4.6 appends `<|assistant|>`, and a newline and `<think></think>` when `enable_thinking` is
false; that of 4.7 appends `<think>`, or a bare `</think>`. A model may go to a `<tool_call>` without closing its
thinking. One newline may stand behind the end marker.

Defined by the `chat_template` of zai-org/GLM-4.5 and zai-org/GLM-4.7.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class Glm45(ReasoningParser):
    """Thinking between `<think>` and `</think>`, which a tool call ends too."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(
            reasoning=Markers(
                "<think>",
                "</think>",
                after_start="",
                before_end="",
                after_end="\n",
                ended_by_tools=True,
                ended_by=("<tool_call>",),
            )
        )
