"""Running a parser without a model: text in, the folded reply out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dovetail.contracts.output import Event, TemplateView
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.sdk.formats.output import Folded, FormatParser, fold


@dataclass(frozen=True, slots=True)
class PlainTemplate(TemplateView):
    """A chat template of which only the source is known."""

    source: str = ""


@dataclass(frozen=True, slots=True)
class BytesTokenizer:
    """One token per byte, and the added tokens that a test names (their ids start at 256)."""

    names: tuple[str, ...] = field(default=())

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids by text."""
        return {name: 256 + i for i, name in enumerate(self.names)}

    @property
    def vocab_size(self) -> int:
        """Bytes and added tokens."""
        return 256 + len(self.names)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the bytes of the text; added tokens in it are spelled out."""
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte, or the added token's text."""
        if 0 <= token_id < 256:
            return bytes([token_id])
        return self.names[token_id - 256].encode() if token_id < self.vocab_size else b""


def parse_chunks(
    parser: ReasoningParser, chunks: Iterable[str], *, template: str = "", prompt_tail: str = ""
) -> Folded:
    """Return the reply that a client receives when the output arrives in these pieces of text.

    Args:
        parser: An instance of the plugin's class.
        chunks: The output, cut anywhere.
        template: Source of the model's chat template, as far as the parser looks at it.
        prompt_tail: What the template appended to the prompt, such as `<think>` and a newline.
    """
    spec = parser.spec(BytesTokenizer(), PlainTemplate(template), ParserRequest())
    machine = FormatParser(spec)
    machine.prime(prompt_tail)
    events: list[Event] = []
    for chunk in chunks:
        events += machine.feed((), chunk)
    return fold([*events, *machine.finish("stop")])
