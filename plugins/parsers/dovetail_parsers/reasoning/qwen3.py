r"""`qwen3`: Qwen3, hybrid (`enable_thinking`) and Thinking models, QwQ.

```
<think>
Paris is the capital.
</think>

The capital of France is Paris.
```

The chat template appends nothing when thinking is on (the model opens it), `<think>\n` in the Thinking models, and
`<think>\n\n</think>\n\n` when `enable_thinking` is false; some templates close it so unless `enable_thinking` is true.
A model may go to a `<tool_call>` without closing its thinking.

Defined by the `chat_template` in the tokenizer_config.json of Qwen/Qwen3-8B and Qwen/Qwen3-4B-Thinking-2507.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class Qwen3(ReasoningParser):
    """Thinking between `<think>` and `</think>`, which a tool call ends too."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(reasoning=Markers("<think>", "</think>", ended_by_tools=True, ended_by=("<tool_call>",)))
