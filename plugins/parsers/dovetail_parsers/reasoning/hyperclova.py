r"""`hyperclova`: HyperCLOVA X SEED Think, see `dovetail_parsers.hyperclova`.

```
/think
Paris is the capital.<|im_end|>
<|im_start|>assistant
It is Paris.<|im_end|><|endofturn|>
```

The template appends `<|im_start|>assistant`, and what follows it where thinking is forced or skipped.

Defined by the `chat_template` of naver-hyperclovax/HyperCLOVAX-SEED-Think-14B.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail_parsers.hyperclova import HyperClovaParser


class HyperClova(ReasoningParser):
    """Thinking in a message of its own."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the machine."""
        return FormatSpec(machine=HyperClovaParser)
