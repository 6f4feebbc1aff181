r"""`qwen3-thinking`: Qwen3 models that always think, such as Qwen3-235B-A22B-Thinking-2507.

```
Paris is the capital.
</think>

The capital of France is Paris.
```

As `qwen3`, except that the template always appends `<think>` and a newline, so the output holds no start marker. Text
without a prompt to look at is taken to start inside thinking.

Defined by the `chat_template` of Qwen/Qwen3-235B-A22B-Thinking-2507.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, State, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class Qwen3Thinking(ReasoningParser):
    """Thinking from the first token on, up to `</think>` or a tool call."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(
            reasoning=Markers("<think>", "</think>", ended_by_tools=True, ended_by=("<tool_call>",)), initial=State.IN
        )
