"""Token ids to text, a few at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class TokenTables(Protocol):
    """What reading a reply asks of the model's tokenizer, token by token."""

    @property
    def pieces(self) -> Mapping[int, str | None]:
        """Text of a token by id; None where its bytes are not whole characters."""
        ...

    @property
    def bytes_table(self) -> Mapping[int, bytes]:
        """Bytes of a token by id."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Added tokens, special or not, and their ids."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that give no text where special tokens are left out."""
        ...

    @property
    def strips_leading_space(self) -> bool:
        """Whether a text decoded from its start loses one leading space (sentencepiece)."""
        ...

    @property
    def plain(self) -> dict[Any, Any]:
        """Tables of `dovetail.sdk.formats.plain`, by what they are for."""
        ...


class Detokenizer:
    """Turns one sequence's tokens into text as they arrive. The pieces concatenate to the text of the whole.

    A character whose bytes are spread over tokens comes out with the last of them. Bytes that can no longer become a
    character come out as U+FFFD.

    Attributes:
        pending: Bytes of a character whose other bytes are still to come.
        skipped: Tokens that give no text.
    """

    def __init__(
        self,
        tokenizer: TokenTables,
        *,
        skip_special_tokens: bool = True,
        at_start: bool = False,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """Prepare.

        Args:
            tokenizer: The model's.
            skip_special_tokens: Special tokens give no text.
            at_start: The ids begin a text, so that a sentencepiece prefix space is dropped. A model's output
                continues its prompt and keeps it.
            keep: Special tokens that give text all the same.
        """
        self._pieces = tokenizer.pieces
        self._bytes = tokenizer.bytes_table
        self.skipped = tokenizer.special_ids - keep if skip_special_tokens else frozenset()
        self.pending = b""
        self._strip = at_start and tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """Return the text that one more token completes."""
        if token_id in self.skipped:
            return ""
        text = self._pieces[token_id]
        if text is None or self.pending:
            data = self.pending + self._bytes[token_id]
            text, used = codecs.utf_8_decode(data, "replace", False)
            self.pending = data[used:]
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that more tokens complete."""
        return "".join([self.push(token_id) for token_id in ids])

    def flush(self) -> str:
        """Return what stands for an unfinished character, if any; call it when no token follows."""
        text, self.pending = self.pending.decode(errors="replace"), b""
        return text
