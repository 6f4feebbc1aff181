"""`Constraint`: what one request may say next, from its thinking's gate and its grammar's matcher together."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dovetail.contracts.grammar import GrammarBackend, GrammarMatcher, Vocabulary
from dovetail.grammar.matching.reasoning_gate import ReasoningGate
from dovetail.messages import SamplerParams
from dovetail.sdk.masks import Words, clear_bit, full_row, has_bit, is_only, new_row, set_bit

# `WordRules`: tokens that a request may say at all, and words that it may not.


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


MAX_ROWS = 64
"""Rows that are kept for sets of tokens that requests name: those that were asked for last."""


class TokenSets:
    """Masks of a vocabulary that every constraint may need; made once.

    Attributes:
        not_eos: Mask row of all tokens but the `eos_ids`, which end a reply.
        non_eos_mask: Returns the row of `not_eos` without a set of tokens; kept.
        beginnings: Returns the row of the tokens with which a text may begin; kept.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = vocabulary.size
        self.tokens = vocabulary.tokens
        self.eos_ids = vocabulary.eos_ids
        self.full = full_row(vocabulary.size)
        self.not_eos = self.full & ~new_row(vocabulary.size, (i for i in vocabulary.eos_ids if i < vocabulary.size))
        self.non_eos_mask = lru_cache(MAX_ROWS)(self._non_eos_mask)
        self.beginnings = lru_cache(MAX_ROWS)(self._beginnings)

    def _non_eos_mask(self, but: frozenset[int]) -> Words:
        """Return the row of all tokens that are neither an end of the reply nor in `but`."""
        return self.not_eos & ~new_row(self.size, (i for i in but if i < self.size))

    def _beginnings(self, text: bytes) -> Words:
        """Return the row of the tokens with which a text may begin, or which are all of it."""
        return new_row(self.size, (i for i, token in enumerate(self.tokens) if token and text.startswith(token)))


class ConstraintMark(NamedTuple):
    """A place that a constraint can be taken back to."""

    num_taken: int
    num_matched: int
    leading: bytes
    tail: tuple[int, ...]


class Constraint:
    """One request's. Without a matcher, thinking (a budget without a grammar) and words are watched over alone.

    Attributes:
        gate: Follows thinking; None where there is none.
        rules: Words that may be said at all; None for all. What the gate forces goes before them.
        matcher: The grammar's state.
        backend: What `matcher` belongs to.
        was_forced: The last token was the only one that its mask had left.
    """

    def __init__(
        self,
        sets: TokenSets,
        gate: ReasoningGate | None,
        matcher: GrammarMatcher | None,
        backend: GrammarBackend | None = None,
        stop_ids: Iterable[int] = (),
        rules: WordRules | None = None,
    ) -> None:
        """Start at the prompt's end. `stop_ids`: the request's own, which a minimum length bans beside the ends."""
        self.gate = gate
        self.matcher = matcher
        self.backend = backend
        self.rules = rules
        self.was_forced = False
        self._is_plain = gate is None and rules is None
        self._plain_matcher = matcher if self._is_plain else None
        self._row: Words | None = None
        self._only = -1
        self._stuck_at = -1
        self._sets = sets
        self._leading = b""
        """What is left of the text between thinking and the grammar's."""
        self._num_taken = self._num_matched = 0
        self._non_eos_mask = sets.non_eos_mask(frozenset(stop_ids) - sets.eos_ids)

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
        """The backend's matcher, where its own mask is needed for the next token."""
        gate = self.gate
        if gate is not None and not gate.covers_reply and (gate.free or gate.forced_ids is not None):
            return None
        return self.matcher

    def known(self) -> tuple[Hashable, Words] | None:
        """Return what stands for the mask of the next token, and the mask, where it is at hand; None: see `fill`.

        That is the backend's, where nothing changes it, and the mask of thinking before a grammar.
        """
        gate, matcher, backend = self.gate, self.matcher, self.backend
        if self._plain_matcher is not None and backend is not None:
            known = backend.known(self._plain_matcher)
            return None if known is None else ((backend, known[0]), known[1])
        if matcher is None or backend is None or self.rules is not None:
            return None
        if gate is not None:
            if gate.forced_ids is not None or gate.extra_id is not None:
                return None
            if gate.free:
                but = gate.forbidden_ids
                return None if gate.covers_reply else (("thinking", but), self._sets.non_eos_mask(but))
            if gate.forbidden_id is not None or self._leading:
                return None
        found = backend.known(matcher)
        return None if found is None else ((backend, found[0]), found[1])

    def take_known(self, only: int) -> None:
        """In place of `fill`: the next token is drawn by a mask that `known` returned; `only`: all it allows, or -1."""
        self._row = None
        self._only = -1 if self.gate is not None and self.gate.free else only

    def fill(self, row: Words, matched: bool) -> bool:
        """Complete a row of the mask; False: everything is allowed.

        Args:
            row: `[W]`; holds the matcher's mask where `matched`. It stays as it is until the next token is accepted.
            matched: Whether `matching` wrote the row: False where there is none, or it allows everything.
        """
        self._only = -1
        if self._is_plain:
            self._row = row if matched else None
            return matched
        written = self._fill(row, matched)
        gate = self.gate
        if self.rules is None or (gate is not None and gate.forced_ids is not None):
            return written
        if not written:
            row[:] = self._sets.full
        self.rules.apply(row)
        self._stuck_at = -1 if row.any() else self._num_taken
        return True

    def _fill(self, row: Words, matched: bool) -> bool:
        """As `fill`, without the rules for words."""
        gate, sets = self.gate, self._sets
        self._row = None
        if gate is not None:
            forced = gate.forced_ids
            # A grammar of the whole reply may be in the middle of a character, which it wants to be finished first.
            if forced is not None and not (gate.covers_reply and matched and not any(has_bit(row, i) for i in forced)):
                row[:] = 0
                for token_id in forced:
                    set_bit(row, token_id)
                return True
            if gate.free and not gate.covers_reply and self.matcher is not None:
                row[:] = sets.non_eos_mask(gate.forbidden_ids)
                return True
            if matched and gate.extra_id is not None:
                set_bit(row, gate.extra_id)
            matched = self._ban(row, gate.forbidden_id, matched)
        if matched and self._leading:
            np.bitwise_or(row, sets.beginnings(self._leading), out=row)
        self._row = row if matched else None
        return matched

    def forced(self) -> list[int]:
        """Return the tokens that must follow by the grammar, as far as it is known which."""
        matcher = self.matcher
        if (
            matcher is None
            or self.matching is None
            or self.rules is not None
            or self._leading
            or (self.gate is not None and self.gate.extra_id is not None)
        ):
            return []
        return matcher.forced()

    def _ban(self, row: Words, banned: int | None, written: bool) -> bool:
        """Take a token out of a row, unless nothing else is allowed; returns whether the row is written."""
        if banned is None:
            return written
        if not written:
            row[:] = self._sets.full
        clear_bit(row, banned)
        if not row.any():
            set_bit(row, banned)
        return True

    def accept(self, token_id: int) -> str | None:
        """Take a sampled token; returns an error if it does not fit, and then the request must end."""
        row, gate = self._row, self.gate
        # Looked at here: where tokens stand beside this one, as nearly always, its word of the mask says so.
        self.was_forced = token_id == self._only if row is None else is_only(row, token_id)
        if self._stuck_at == self._num_taken:
            return "allowed_token_ids, bad_words and the grammar together leave no token to say"
        self._num_taken += 1
        if self.rules is not None:
            self.rules.tail.append(token_id)
        if gate is not None and gate.accept(token_id) and not gate.covers_reply:
            if gate.free:
                return None
            self._leading = gate.after
            return self._take_rest(gate.text_after_marker)
        matcher = self.matcher
        if matcher is None:
            return None
        if self._leading and self._take_leading(self._sets.tokens[token_id] if token_id < self._sets.size else b""):
            return None
        if matcher.accept((token_id,)) == 1:
            self._num_matched += 1
            self._leading = b""
            return matcher.error
        return matcher.error or f"the grammar does not allow token {token_id} here"

    def mark(self) -> ConstraintMark:
        """Return the present place, for `back_to`."""
        tail = () if self.rules is None else tuple(self.rules.tail)
        return ConstraintMark(self._num_taken, self._num_matched, self._leading, tail)

    def back_to(self, mark: ConstraintMark) -> None:
        """Take back what was accepted since a mark: at most `MAX_ROLLBACK` tokens, all of them without an error."""
        if self.gate is not None:
            self.gate.rollback(self._num_taken - mark.num_taken)
        if self.matcher is not None and self._num_matched > mark.num_matched:
            self.matcher.rollback(self._num_matched - mark.num_matched)
        if self.rules is not None:
            self.rules.tail.clear()
            self.rules.tail.extend(mark.tail)
        self._num_taken, self._num_matched, self._leading, _ = mark

    def only_ends(self, row: Words) -> bool:
        """Whether a filled row allows nothing but ends of the reply and stop tokens."""
        return not np.any(row & self._non_eos_mask)

    def _take_rest(self, rest: bytes) -> str | None:
        """Text behind the end marker in the marker's last token: no mask was applied to it."""
        if self.matcher is None or not rest:
            return None
        if self._take_leading(rest):
            return None
        return "the answer began in the middle of the token that ended thinking, where no grammar can be enforced"

    def _take_leading(self, text: bytes) -> bool:
        """Take text that stands before the grammar's: the output parser drops it, whatever the grammar allows."""
        if not text or not self._leading.startswith(text):
            return False
        self._leading = self._leading[len(text) :]
        return True
