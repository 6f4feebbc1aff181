"""Log probabilities in the words of the completion API."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.contracts.output import TokenizerView
from dovetail.messages import TokenLogprob
from dovetail_server.apis.completions.schema import CompletionLogprobs
from dovetail_server.apis.logprobs import finite, named, text


class CompletionRows:
    """Builds `logprobs` of a completion, of which a stream takes pieces."""

    def __init__(
        self, num_top: int, tokenizer: TokenizerView, offsets: Sequence[int], echo_len: int, *, as_ids: bool = False
    ) -> None:
        """Prepare.

        Args:
            num_top: Rivals per token.
            tokenizer: The model's.
            offsets: Grows with the output: characters of it before each token.
            echo_len: Characters of the echoed prompt, which come before the output.
            as_ids: Name tokens by their ids.
        """
        self.num_top = num_top
        self.tokenizer = tokenizer
        self.offsets = offsets
        self.echo_len = echo_len
        self.as_ids = as_ids
        self.num_taken = 0
        self._rows: list[TokenLogprob] = []
        self._starts: list[int] = []

    def take_prompt(self, rows: Sequence[TokenLogprob]) -> None:
        """Add the echoed prompt's tokens."""
        at = 0
        for row in rows:
            self._starts.append(at)
            at += len(text(self.tokenizer.token_bytes(row.token_id)))
        self._rows += rows

    def take(self, rows: Sequence[TokenLogprob]) -> None:
        """Add generated tokens."""
        end = self.num_taken + len(rows)
        self._starts += [self.echo_len + offset for offset in self.offsets[self.num_taken : end]]
        self._rows += rows
        self.num_taken = end

    def pop(self) -> CompletionLogprobs | None:
        """Return and forget what was added; None if nothing was."""
        rows, self._rows = self._rows, []
        starts, self._starts = self._starts, []
        if not rows:
            return None
        return CompletionLogprobs(
            tokens=[self._name(row.token_id) for row in rows],
            token_logprobs=[None if row.logprob is None else finite(row.logprob) for row in rows],
            top_logprobs=[self._top(row) for row in rows] if self.num_top or any(row.named for row in rows) else None,
            text_offset=starts,
        )

    def _name(self, token_id: int) -> str:
        return named(token_id, self.tokenizer.token_bytes(token_id), self.as_ids)

    def _top(self, row: TokenLogprob) -> dict[str, float] | None:
        if row.logprob is None:
            return None
        found = {self._name(c.token_id): finite(c.logprob) for c in reversed((*row.top[: self.num_top], *row.named))}
        found.setdefault(self._name(row.token_id), finite(row.logprob))
        return found
