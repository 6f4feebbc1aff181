r"""`gpt-oss`: gpt-oss-20b, gpt-oss-120b and others that write harmony, see `dovetail_parsers.harmony`.

```
<|channel|>analysis<|message|>Paris is the capital.<|end|><|start|>assistant<|channel|>final<|message|>It is Paris.
```

The template appends `<|start|>assistant`. Reasoning is the channel `analysis`.

Defined by the openai/harmony repository, `docs/format.md`.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail_parsers.harmony import MESSAGES, HarmonyParser


class GptOss(ReasoningParser):
    """Reasoning on harmony's analysis channel."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the machine, and its messages for the engine."""
        return FormatSpec(machine=HarmonyParser, messages=MESSAGES)
