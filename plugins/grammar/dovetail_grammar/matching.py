"""What matchers share whose library does not keep the ends of a reply as Dovetail means them: every end, and once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.contracts.grammar import Vocabulary
from dovetail.sdk.masks import Words, new_row

if TYPE_CHECKING:
    from dovetail.contracts.grammar import Mask


@dataclass(frozen=True, slots=True)
class Ends:
    """The tokens that end a reply: their ids, and a row of a mask that allows nothing else."""

    ids: frozenset[int]
    row: Words

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Ends:
        """Return those of a vocabulary."""
        return cls(vocabulary.eos_ids, new_row(vocabulary.size, vocabulary.eos_ids))


class EndingMatcher(ABC):
    """A `GrammarMatcher` over a library's state of the text; the end of the reply is kept here."""

    def __init__(self, ends: Ends, *, terminated: bool = False) -> None:
        self._ends = ends
        self._terminated = terminated

    @property
    def terminated(self) -> bool:
        """An end has been accepted."""
        return self._terminated

    @property
    def accepting(self) -> bool:
        """The text is complete."""
        return not self._terminated and self._complete()

    def fill(self, mask: Mask, row: int) -> bool:
        """Compute the mask in place; where nothing can follow, only ends are allowed."""
        line = mask[row]
        if self.is_over:
            line[:] = self._ends.row
        else:
            self._fill(line)
        return True

    @property
    def is_over(self) -> bool:
        """Whether nothing but an end can follow."""
        return self._terminated

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance."""
        for count, token_id in enumerate(token_ids):
            if self._terminated:
                return count
            if token_id in self._ends.ids:
                if not self._complete():
                    return count
                self._terminated = True
            elif not self._advance(token_id):
                return count
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Undo."""
        if num_tokens and self._terminated:
            self._terminated = False
            num_tokens -= 1
        if num_tokens:
            self._retreat(num_tokens)

    @abstractmethod
    def _complete(self) -> bool:
        """Whether the text is complete."""

    @abstractmethod
    def _fill(self, line: Words) -> None:
        """Write the allowed tokens, the ends among them where the text is complete."""

    @abstractmethod
    def _advance(self, token_id: int) -> bool:
        """Take one token that is no end; False: it is not allowed, and nothing changed."""

    @abstractmethod
    def _retreat(self, num_tokens: int) -> None:
        """Take back the last tokens, which are no ends."""
