r"""`muse`: Muse Spark, see `dovetail_parsers.muse`.

```
 to=self<|message|>Paris is the capital.<|eom|><|start|>assistant to=user<|message|>It is Paris.
```

The template appends `<|start|>assistant`. A message to nobody is reasoning.

Defined by the description of the format in vLLM's `reasoning/muse_reasoning_parser.py`.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail_parsers.muse import SPARK, SparkParser


class Muse(ReasoningParser):
    """Reasoning in messages to the model itself."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the machine, and its messages for the engine."""
        return FormatSpec(machine=SparkParser, messages=SPARK)
