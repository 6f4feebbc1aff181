"""`template`: whatever the model's chat template writes around thinking.

The format is not written down here: it is read off the template, see `dovetail_parsers.derived.derive`. `auto` takes
this parser where no other one reads back what the template writes. A model without a template, or with one that shows
no thinking, has none.

Defined by the model's own `chat_template`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.contracts.output import FormatSpec, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail_parsers.derived.derive import derive, thinking_lines


class TemplateReasoning(ReasoningParser):
    """Thinking where the template has it."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare what was derived."""
        found = derive(template)
        is_silent = found.regions is not None and not found.regions.has("thinking")
        return FormatSpec() if is_silent else found.spec()

    def described(self, template: TemplateView) -> Mapping[str, str]:
        """Say what was derived."""
        return thinking_lines(derive(template))
