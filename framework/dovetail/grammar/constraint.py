"""`Constraint`: what one request may say next, from its thinking gate and its grammar's matcher together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.contracts.grammar import GrammarBackend, GrammarMatcher, Vocabulary
from dovetail.grammar.bits import Words, full_row, new_row, set_bit
from dovetail.grammar.gate import ThinkingGate

MAX_LEAD = 4
"""Whitespace characters allowed between the end of thinking and the grammar's text: templates put newlines there,
and forbidding them costs quality."""
WHITESPACE = b" \t\r\n"


class TokenSets:
    """Masks of a vocabulary that every constraint may need; made once.

    Attributes:
        eos: The ids that end a reply.
        not_eos: All others.
        lead: By n - 1: the tokens that are one to n whitespace characters.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = vocabulary.size
        self.tokens = vocabulary.tokens
        self.eos_ids = vocabulary.eos_ids
        self.eos = new_row(vocabulary.size, (i for i in vocabulary.eos_ids if i < vocabulary.size))
        self.not_eos = full_row(vocabulary.size) & ~self.eos
        self.lead_len = {
            i: len(token)
            for i, token in enumerate(vocabulary.tokens)
            if 0 < len(token) <= MAX_LEAD and _is_space(token)
        }
        self.lead = [
            new_row(vocabulary.size, (i for i, length in self.lead_len.items() if length <= n + 1))
            for n in range(MAX_LEAD)
        ]


class Constraint:
    """One request's. With no matcher only thinking is watched over (a budget without a grammar).

    Attributes:
        gate: Follows thinking; None where there is none.
        matcher: The grammar's state.
        backend: What `matcher` belongs to.
    """

    def __init__(
        self,
        sets: TokenSets,
        gate: ThinkingGate | None,
        matcher: GrammarMatcher | None,
        backend: GrammarBackend | None = None,
    ) -> None:
        self.gate = gate
        self.matcher = matcher
        self.backend = backend
        self._sets = sets
        self._lead = 0

    @property
    def error(self) -> str | None:
        """Why the request cannot go on, or None."""
        return None if self.matcher is None else self.matcher.error

    @property
    def terminated(self) -> bool:
        """The grammar's end has been accepted."""
        return self.matcher is not None and self.matcher.terminated

    @property
    def matching(self) -> GrammarMatcher | None:
        """The matcher, where its own mask is needed for the next token."""
        gate = self.gate
        if gate is not None and (gate.in_reasoning or gate.forced is not None):
            return None
        return self.matcher

    def fill(self, row: Words, matched: bool) -> bool:
        """Complete a row of the mask; False: everything is allowed.

        Args:
            row: `[W]`; holds the matcher's mask where `matched`.
            matched: Whether `matching` wrote the row: False where there is none, or it allows everything.
        """
        gate, sets = self.gate, self._sets
        if gate is not None:
            forced = gate.forced
            if forced is not None:
                row[:] = 0
                set_bit(row, forced)
                return True
            if gate.in_reasoning:
                if self.matcher is None:
                    return False
                row[:] = sets.not_eos
                return True
            if self.matcher is None:
                return self._fill_closed(row)
            if matched and gate.offered is not None:
                set_bit(row, gate.offered)
        if matched and self._lead > 0:
            np.bitwise_or(row, sets.lead[self._lead - 1], out=row)
        return matched

    def _fill_closed(self, row: Words) -> bool:
        """No grammar, and a budget of nothing: thinking must not begin."""
        banned = None if self.gate is None else self.gate.banned
        if banned is None:
            return False
        row[:] = full_row(self._sets.size) & ~new_row(self._sets.size, [banned])
        return True

    def accept(self, token_id: int) -> str | None:
        """Take a sampled token; returns an error if it does not fit, and then the request must end."""
        gate = self.gate
        if gate is not None and gate.accept(token_id):
            if not gate.in_reasoning and gate.state == "out":
                self._lead = MAX_LEAD
                return self._take_rest(gate.rest)
            return None
        matcher = self.matcher
        if matcher is None:
            return None
        if matcher.accept([token_id]) == 1:
            self._lead = 0
            return matcher.error
        length = self._sets.lead_len.get(token_id, 0)
        if 0 < length <= self._lead:
            self._lead -= length
            return None
        return matcher.error or f"the grammar does not allow token {token_id} here"

    def only_ends(self, row: Words) -> bool:
        """Whether a filled row allows nothing but ends of the reply."""
        return not np.any(row & self._sets.not_eos)

    def _take_rest(self, rest: bytes) -> str | None:
        """Text behind the end marker in the marker's last token: no mask was applied to it."""
        if self.matcher is None or not rest:
            return None
        if len(rest) <= self._lead and _is_space(rest):
            self._lead -= len(rest)
            return None
        return "the answer began in the middle of the token that ended thinking, where no grammar can be enforced"


def _is_space(token: Sequence[int]) -> bool:
    return all(byte in WHITESPACE for byte in token)
