"""Reasoning formats that are the same for every template and request: `Declared`."""

from __future__ import annotations

from typing import ClassVar

from dovetail.contracts.output import FormatSpec, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class Declared(ReasoningParser):
    """A format that needs neither template nor request.

    Attributes:
        form: The format.
    """

    form: ClassVar[FormatSpec]

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Return the format."""
        return self.form
