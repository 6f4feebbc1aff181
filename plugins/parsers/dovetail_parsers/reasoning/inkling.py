r"""`inkling`: Inkling, see `dovetail_parsers.inkling`.

```
<|message_model|><|content_thinking|>Paris is the capital.<|end_message|>
<|message_model|><|content_text|>It is Paris.<|end_message|><|content_model_end_sampling|>
```
(without the line break).

Defined by the tml-renderers package (TMLv0).
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail_parsers.inkling import MESSAGES, InklingParser


class Inkling(ReasoningParser):
    """Reasoning in messages of a kind of their own."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the machine, and its messages for the engine."""
        return FormatSpec(machine=InklingParser, messages=MESSAGES)
