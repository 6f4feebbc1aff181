r"""`seed-oss`: Seed-OSS.

```
<seed:think>Paris is the capital.</seed:think>The capital of France is Paris.
```

The template appends the assistant's header; with `thinking_budget` 0 it appends a closed thought as well. No newlines
stand around the markers.

Defined by the `chat_template` of ByteDance-Seed/Seed-OSS-36B-Instruct.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class SeedOss(ReasoningParser):
    """Thinking between `<seed:think>` and `</seed:think>`."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(
            reasoning=Markers(
                "<seed:think>", "</seed:think>", after_start="", before_end="", after_end="", ended_by_tools=True
            )
        )
