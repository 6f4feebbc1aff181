"""Log probabilities in the words of each API."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.contracts.output import TokenizerView
from dovetail.messages import TokenLogprob
from dovetail_server.native.generate import TokenRow
from dovetail_server.openai.chat import TokenAlternative, TokenInfo
from dovetail_server.openai.common import PromptLogprob, PromptLogprobs
from dovetail_server.openai.completions import CompletionLogprobs

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot write."""

TextOf = Callable[[int], str]


def finite(value: float | None) -> float:
    """Return a log probability that JSON can carry."""
    return FLOOR if value is None or not value > FLOOR else value


def chat_logprobs(
    rows: Sequence[TokenLogprob], num_top: int, tokenizer: TokenizerView, *, as_ids: bool = False
) -> list[TokenInfo]:
    """Write rows as `choices[].logprobs.content`; with `as_ids` tokens are named by their ids."""
    result = []
    for row in rows:
        raw = tokenizer.token_bytes(row.token_id)
        top = []
        for candidate in (*row.top[:num_top], *row.named):
            data = tokenizer.token_bytes(candidate.token_id)
            top.append(TokenAlternative(named(candidate.token_id, data, as_ids), finite(candidate.logprob), list(data)))
        result.append(TokenInfo(named(row.token_id, raw, as_ids), finite(row.logprob), list(raw), top))
    return result


def named(token_id: int, raw: bytes, as_ids: bool) -> str:
    """Return how a token is named: by its text, or by its id."""
    return f"token_id:{token_id}" if as_ids else text(raw)


def text(raw: bytes) -> str:
    """Return a token's text; a cut character becomes U+FFFD."""
    return raw.decode(errors="replace")


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


def prompt_logprobs(rows: Sequence[TokenLogprob], tokenizer: TokenizerView) -> PromptLogprobs:
    """Write rows as `prompt_logprobs`: per position the candidates by token id, null for the first token."""
    result: PromptLogprobs = []
    for row in rows:
        if row.logprob is None:
            result.append(None)
            continue
        ranks = {c.token_id: i + 1 for i, c in enumerate(row.top)}
        entry = {row.token_id: row.logprob} | {c.token_id: c.logprob for c in (*row.top, *row.named)}
        result.append(
            {
                str(i): PromptLogprob(finite(value), ranks.get(i), text(tokenizer.token_bytes(i)))
                for i, value in entry.items()
            }
        )
    return result


def native_rows(rows: Sequence[TokenLogprob], text_of: TextOf | None) -> list[TokenRow]:
    """Write rows as `[logprob, token_id, text or null]`."""
    return [
        (None if r.logprob is None else finite(r.logprob), r.token_id, text_of(r.token_id) if text_of else None)
        for r in rows
    ]


def native_top(rows: Sequence[TokenLogprob], num_top: int, text_of: TextOf | None) -> list[list[TokenRow] | None]:
    """Write the rivals of each row."""
    return [
        None
        if row.logprob is None
        else [(finite(c.logprob), c.token_id, text_of(c.token_id) if text_of else None) for c in row.top[:num_top]]
        for row in rows
    ]


def native_named(rows: Sequence[TokenLogprob], text_of: TextOf | None) -> list[list[TokenRow] | None]:
    """Write the tokens of each row that the request names."""
    return [
        None
        if row.logprob is None
        else [(finite(c.logprob), c.token_id, text_of(c.token_id) if text_of else None) for c in row.named]
        for row in rows
    ]
