"""What reasoning parsers share whose format is a pair of markers and nothing more: `Between`."""

from __future__ import annotations

from typing import ClassVar

from dovetail.contracts.output import FormatSpec, Markers, State, TemplateView, TokenizerView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser


class Between(ReasoningParser):
    """Thinking between two markers.

    Attributes:
        markers: Of thinking.
        answer: Around an answer, where the format marks it.
        dropped: Markers that mean nothing.
        initial: The state for text that comes without a prompt.
    """

    markers: ClassVar[Markers]
    answer: ClassVar[Markers | None] = None
    dropped: ClassVar[tuple[str, ...]] = ()
    initial: ClassVar[State] = State.OPEN

    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the markers."""
        return FormatSpec(reasoning=self.markers, answer=self.answer, dropped=self.dropped, initial=self.initial)
