"""`template`: whatever the model's chat template writes around thinking.

The format is not written down here: it is read off the template, see `dovetail.text.detection.derive`. `auto` takes
this parser where no other one reads back what the template writes. A model without a template, or with one that shows
no thinking, has none.

Defined by the model's own `chat_template`.
"""

from __future__ import annotations

from dovetail.contracts.output import FormatSpec, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.text.detection.derive import derive


class Template(ReasoningParser):
    """Thinking where the template has it."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare what was derived."""
        return derive(template).spec()
