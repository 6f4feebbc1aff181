r"""`muse-glimmer`: Muse Glimmer, see `dovetail_parsers.muse`.

```
 to=self<|message|>Paris is the capital.<|eom|><|start|>assistant to=user<|message|>It is Paris.
```

The template appends `<|start|>assistant`. A message to nobody is content.

Defined by the `chat_template` of Muse Glimmer.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail_parsers.muse import MESSAGES, MuseParser


class MuseGlimmer(ReasoningParser):
    """Reasoning in messages to the model itself."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the machine, and its messages for the engine."""
        return FormatSpec(machine=MuseParser, messages=MESSAGES)
