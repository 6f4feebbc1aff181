r"""`mistral`: Magistral and other Mistral models that reason, with tokenizers of version 13 and later.

```
[THINK]Paris is the capital.[/THINK]The capital of France is Paris.
```

Both markers are special tokens. The prompt ends with `[/INST]`; the model opens thinking itself. A tool call's marker
ends it too, since it cannot be a quotation.

Defined by mistral-common, `tokens/tokenizers/instruct.py`, and the `chat_template` of
mistralai/Magistral-Small-2509.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, Markers, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class Mistral(ReasoningParser):
    """Thinking between `[THINK]` and `[/THINK]`."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(
            reasoning=Markers("[THINK]", "[/THINK]", after_start="", before_end="", after_end="", ended_by_tools=True)
        )
