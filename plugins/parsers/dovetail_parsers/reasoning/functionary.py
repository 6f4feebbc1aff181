r"""`functionary`: Functionary, see `dovetail_parsers.functionary`.

```
all
The capital of France is Paris.
```

The models do not think; what is sent to `all` is the answer, also of requests without tools.

Defined by the `chat_template` of meetkai/functionary-medium-v3.2.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail_parsers.functionary import FunctionaryParser


class Functionary(ReasoningParser):
    """Answers to `all`."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the machine."""
        return FormatSpec(machine=FunctionaryParser)
