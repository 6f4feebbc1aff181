"""Which tokens a piece of output is made of, where events of several kinds come out of one step.

Reasoning, text and calls are cut out of one sequence of tokens. A piece of text is looked for in the bytes of the
tokens that wait; what lies before it are markers and the newlines around them, which belong to no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.contracts.output import TokenizerView
from dovetail.messages import TokenLogprob


@dataclass(slots=True)
class PendingToken:
    """A token that waits: how many of its bytes do, and whether its row was handed out with the others."""

    row: TokenLogprob
    num_bytes: int
    is_given: bool = False


@dataclass(slots=True)
class TokenRows:
    """The log probabilities of a choice's tokens, handed out with the text that they make up."""

    tokenizer: TokenizerView
    _tokens: deque[PendingToken] = field(default_factory=deque)
    _bytes: bytearray = field(default_factory=bytearray)

    def add(self, rows: Sequence[TokenLogprob]) -> None:
        """Take the rows of a step."""
        for row in rows:
            data = self.tokenizer.token_bytes(row.token_id)
            self._bytes += data
            self._tokens.append(PendingToken(row, len(data)))

    def take(self, text: str) -> list[TokenLogprob]:
        """Return the rows of the tokens that `text` is made of, and forget those before it.

        Text that is in no token as it stands, such as the sign for broken UTF-8, gets all that wait.
        """
        data = text.encode("utf-8", "replace")
        start = self._bytes.find(data)
        if start < 0:
            return self._advance(len(self._bytes))
        self._advance(start, is_skipped=True)
        return self._advance(len(data))

    def skip(self, text: str) -> None:
        """Forget the tokens of `text`, if it is in them as it stands, and those before it."""
        data = text.encode("utf-8", "replace")
        start = self._bytes.find(data)
        if start >= 0:
            self._advance(start + len(data), is_skipped=True)

    def _advance(self, num_bytes: int, *, is_skipped: bool = False) -> list[TokenLogprob]:
        """Go on by so many bytes and return the rows that were not handed out before.

        A token of which a part was skipped is still to be handed out with the rest.
        """
        del self._bytes[:num_bytes]
        passed: list[TokenLogprob] = []
        while self._tokens and (num_bytes > 0 or self._tokens[0].num_bytes == 0):
            token = self._tokens[0]
            if not token.is_given:
                passed.append(token.row)
            used = min(num_bytes, token.num_bytes)
            num_bytes -= used
            token.num_bytes -= used
            if token.num_bytes:
                token.is_given = not is_skipped
                break
            self._tokens.popleft()
        return passed
