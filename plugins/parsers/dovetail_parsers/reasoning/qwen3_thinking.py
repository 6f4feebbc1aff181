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

    def detect(self, template: TemplateView) -> float:
        """ChatML whose generation prompt opens thinking, without a switch."""
        source = template.source
        if "<|im_start|>" not in source or "</think>" not in source or "enable_thinking" in source:
            return 0.0
        prompt = source.rpartition("add_generation_prompt")[2]
        return 0.85 if "<think>" in prompt and "</think>" not in prompt else 0.2
