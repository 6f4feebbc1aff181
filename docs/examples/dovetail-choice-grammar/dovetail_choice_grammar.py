"""One of several strings, such as `["yes", "no"]`, and nothing else.

The state of a text is what has been written of it. For each state the tokens that may follow are found once, among
those that begin with a byte that may come next, and kept as a mask. V tokens, W = ceil(V / 32) words of a mask.
"""

import json
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts import GrammarBackend, GrammarLimits, GrammarMatcher, GrammarSpec, Kind, Support, Vocabulary
from dovetail.contracts.errors import RequestError


class ChoiceBackend(GrammarBackend):
    """Reads `choice`: a JSON array of strings."""

    kinds = frozenset({Kind.CHOICE})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @cached_property
    def by_first_byte(self) -> dict[int, list[int]]:
        """Token ids that stand for text, by its first byte."""
        found: dict[int, list[int]] = {}
        for token, text in enumerate(self.vocabulary.tokens):
            if text and token not in self.vocabulary.special_ids:
                found.setdefault(text[0], []).append(token)
        return found

    def supports(self, spec: GrammarSpec) -> Support:
        """Say whether `compile` would take it."""
        if spec.kind is not Kind.CHOICE:
            return Support.no(f"{spec.kind.value} is not supported; possible: choice")
        try:
            read_choices(spec.source)
        except RequestError as error:
            return Support.no(str(error))
        return Support.full()

    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> "Choices":
        """Read the strings."""
        if len(spec.source.encode()) > limits.max_source_bytes:
            raise RequestError(f"choice: larger than {limits.max_source_bytes} bytes", param="choice")
        return Choices(self, read_choices(spec.source))


def read_choices(source: str) -> tuple[bytes, ...]:
    """Return the strings of a JSON array as bytes.

    Raises:
        RequestError: It is something else.
    """
    try:
        found = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"choice: not JSON: {error}", param="choice") from None
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise RequestError("choice: expected a list of one or more strings", param="choice")
    return tuple(text.encode("utf-8", "surrogatepass") for text in found)


class Choices:
    """A compiled grammar: the strings, and what is known of each state so far."""

    def __init__(self, backend: ChoiceBackend, choices: tuple[bytes, ...]) -> None:
        self.backend, self.choices = backend, choices
        self.states: dict[bytes, tuple[frozenset[int], NDArray[np.int32]]] = {}

    @property
    def num_bytes(self) -> int:
        """The strings and the masks kept."""
        return sum(map(len, self.choices)) + len(self.states) * 4 * self.backend.vocabulary.mask_words

    def matcher(self) -> GrammarMatcher:
        """Start at the beginning."""
        return ChoiceMatcher(self, [b""], False)

    def after(self, text: bytes) -> tuple[frozenset[int], NDArray[np.int32]]:
        """Return the token ids that may follow `text`, also as a mask `[W]`."""
        if text not in self.states:
            vocabulary, rests = self.backend.vocabulary, {c[len(text) :] for c in self.choices if c.startswith(text)}
            near = [token for rest in rests if rest for token in self.backend.by_first_byte.get(rest[0], ())]
            found = {token for token in near if any(rest.startswith(vocabulary.tokens[token]) for rest in rests)}
            ids = frozenset(found | vocabulary.eos_ids if b"" in rests else found)
            bits = np.zeros(vocabulary.mask_words * 32, dtype=np.uint8)
            bits[list(ids)] = 1
            self.states[text] = ids, np.packbits(bits, bitorder="little").view(np.int32)
        return self.states[text]


class ChoiceMatcher:
    """The text after each accepted token; the last one is the present."""

    error: str | None = None

    def __init__(self, grammar: Choices, texts: list[bytes], terminated: bool) -> None:
        self.grammar, self.texts, self.terminated = grammar, texts, terminated

    @property
    def accepting(self) -> bool:
        """Whether the text is one of the strings."""
        return not self.terminated and self.texts[-1] in self.grammar.choices

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        """Write the mask of the present state."""
        mask[row] = 0 if self.terminated else self.grammar.after(self.texts[-1])[1]
        return True

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance over the tokens that are allowed."""
        vocabulary = self.grammar.backend.vocabulary
        for taken, token in enumerate(token_ids):
            if self.terminated or token not in self.grammar.after(self.texts[-1])[0]:
                return taken
            self.terminated = token in vocabulary.eos_ids
            self.texts.append(self.texts[-1] + (b"" if self.terminated else vocabulary.tokens[token]))
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        if num_tokens:
            del self.texts[-num_tokens:]
            self.terminated = False

    def forced(self) -> list[int]:
        """Return the next token where there is one only."""
        ids = frozenset() if self.terminated else self.grammar.after(self.texts[-1])[0]
        return list(ids) if len(ids) == 1 else []

    def fork(self) -> "ChoiceMatcher":
        """Return an independent copy."""
        return ChoiceMatcher(self.grammar, list(self.texts), self.terminated)
