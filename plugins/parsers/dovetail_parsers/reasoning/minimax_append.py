r"""`minimax-m2-append-think`: MiniMax-M2, its thinking left in the content.

```
<think>Paris is the capital.
</think>

The capital of France is Paris.
```

As `minimax-m2`, for clients that send the thinking back as part of the content: the marker that the prompt ends with
stands before the reply.

Defined by the parsers of this name in vLLM's and SGLang's documentation.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.contracts.output import FormatSpec, Markers, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest
from dovetail_parsers.reasoning.minimax_m2 import MiniMaxM2


class MiniMaxM2AppendThink(MiniMaxM2):
    """Thinking as content."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers, and that they are shown."""
        found = super().spec(tokenizer, template, request)
        markers = found.reasoning or Markers("<think>", "</think>")
        return replace(found, reasoning=replace(markers, shown=True))
