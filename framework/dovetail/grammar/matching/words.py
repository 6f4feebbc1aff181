"""`WordRules`: tokens that a request may say at all, and words that it may not."""

from __future__ import annotations

from collections import deque

from dovetail.messages import SamplerParams
from dovetail.sdk.masks import Words, clear_bit, new_row


class WordRules:
    """One request's. A word of several tokens is banned at its last one, behind the others.

    Attributes:
        tail: The tokens said last, as many as the longest word has before its last one.
    """

    def __init__(self, params: SamplerParams, vocab_size: int) -> None:
        """Take the rules of a request; ids are within the vocabulary."""
        self._allowed = new_row(vocab_size, params.allowed_token_ids) if params.allowed_token_ids else None
        self._single = [word[0] for word in params.bad_words if len(word) == 1]
        self._longer = [(word[:-1], word[-1]) for word in params.bad_words if len(word) > 1]
        self.tail: deque[int] = deque(maxlen=max((len(before) for before, _ in self._longer), default=0))

    @staticmethod
    def are_in(params: SamplerParams) -> bool:
        """Whether a request has any."""
        return bool(params.allowed_token_ids or params.bad_words)

    def apply(self, row: Words) -> None:
        """Take out of a row what may not be said next."""
        if self._allowed is not None:
            row &= self._allowed
        for token_id in self._single:
            clear_bit(row, token_id)
        said = tuple(self.tail)
        for before, last in self._longer:
            if said[-len(before) :] == before:
                clear_bit(row, last)

    def accept(self, token_id: int) -> None:
        """Take what was said."""
        self.tail.append(token_id)
