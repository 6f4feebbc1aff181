"""Acme R2 writes `<r>thinking</r>answer`. The tags are plain text, and no newlines stand around them."""

from dovetail.contracts import FormatSpec, Markers, ParserRequest, ReasoningParser, TemplateView, TokenizerView


class AcmeR2(ReasoningParser):
    """Reasoning between `<r>` and `</r>`."""

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare where reasoning stands; everything else is derived."""
        return FormatSpec(reasoning=Markers("<r>", "</r>", after_start="", before_end="", after_end=""))
