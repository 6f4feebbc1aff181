r"""`outlines`: regular languages by outlines_core, the engine of Outlines: an index over the vocabulary, cheap masks.

A regular expression, a choice, or a JSON Schema of a plain subset (which outlines_core turns into a regular expression)
becomes an index in a process of its own, which travels in outlines_core's binary form. Outlines' on-disk cache and its
logits processors are not used.

Of outlines_core 0.2 one must know: an index has one end token, so that the others are added to the masks here; an end
cannot be accepted in a final state, so that termination is tracked here; its strings hold no `\uXXXX` escapes and its
numbers no unsigned exponents, which narrows texts and is no fault.

Defined by outlines_core's documentation.
"""

from __future__ import annotations

import re
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import (
    CompiledGrammar,
    GrammarLimits,
    GrammarSpec,
    Kind,
    Support,
    Vocabulary,
)
from dovetail.sdk.masks import Words
from dovetail.sdk.schemas import schema
from dovetail_grammar.choices import read_choices
from dovetail_grammar.matching import EndingMatcher, Ends
from dovetail_grammar.patterns import has_inner_anchors, is_unreadable, strip_anchors
from dovetail_grammar.schema_backend import SchemaBackend, import_library
from dovetail_grammar.schema_subset import Subset

WHITESPACE = r"[ \n]{0,%d}"
MAX_WHITESPACE = 20
KEPT_FOR_ROLLBACK = 64
SUBSET = Subset(
    by_type={
        "object": frozenset(("properties", "required", "additionalProperties")),
        "array": frozenset(("items", "minItems", "maxItems")),
        "string": frozenset(("minLength", "maxLength")),
        "integer": frozenset(),
        "number": frozenset(),
    },
    formats=frozenset(),
)


class OutlinesBackend(SchemaBackend):
    """See the module."""

    kinds = frozenset((Kind.REGEX, Kind.CHOICE, Kind.JSON))
    preference = dict.fromkeys(kinds, 20)

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Keep the vocabulary; outlines_core's own form of it is made at first use."""
        super().__init__(vocabulary)
        self._library = import_library("outlines", "outlines_core", "outlines_core.json_schema")

    def library_supports(self, spec: GrammarSpec) -> Support:
        """FULL for regular expressions without look-around and for the subset of schemas that is enforced."""
        if spec.kind is Kind.REGEX and is_unreadable(spec.source):
            return Support.no("look-around, back-references and word boundaries are not regular")
        if spec.kind is Kind.REGEX and has_inner_anchors(spec.source):
            return Support.no("anchors within an expression are ignored")
        if spec.kind is not Kind.JSON:
            return Support.full()
        if _is_open(spec.source):
            return Support.no("values of any type or with any keys have no regular expression")
        return SUBSET.support(spec)

    def library_compile(self, spec: GrammarSpec, limits: GrammarLimits) -> CompiledGrammar | bytes:
        """Build the index and return its binary form."""
        try:
            index = self._index(self._regex(spec))
        except (ValueError, TypeError) as error:
            code = "unsupported_grammar" if spec.kind is Kind.JSON else "invalid_grammar"
            raise RequestError(f"the grammar cannot be compiled: {str(error)[:300]}", code=code) from None
        blob: bytes = index.__reduce__()[1][0]
        return blob

    def library_load(self, blob: bytes) -> CompiledGrammar:
        """Read an index's binary form."""
        return OutlinesGrammar(self._library, self._library.Index.from_binary(blob), len(blob), self._ends)

    def _index(self, regex: str) -> Any:
        """Build an index of a regular expression.

        outlines_core drops tokens of one byte that lead from a complete text to one that is not (`b` in `a(bc)?`),
        unless the expression ends with `$`, which it refuses where the empty text matches.
        """
        try:
            return self._library.Index(f"(?:{regex})$", self._shared())
        except ValueError as error:
            if "universal start state" not in str(error):
                raise
            return self._library.Index(regex, self._shared())

    def _regex(self, spec: GrammarSpec) -> str:
        if spec.kind is Kind.REGEX:
            return strip_anchors(spec.source)
        if spec.kind is Kind.CHOICE:
            return "|".join(f"({re.escape(choice)})" for choice in read_choices(spec.source))
        most = MAX_WHITESPACE if spec.max_whitespace is None else spec.max_whitespace
        between = spec.whitespace if spec.whitespace is not None else WHITESPACE % most
        regex: str = self._library.json_schema.build_regex_from_schema(spec.source, between)
        return regex

    def library_shared(self) -> Any:
        """Make the library's vocabulary."""
        by_bytes: dict[bytes, list[int]] = {}
        for token_id, token in enumerate(self._vocabulary.tokens):
            if token:
                by_bytes.setdefault(token, []).append(token_id)
        return self._library.Vocabulary(min(self._vocabulary.eos_ids), by_bytes)


class OutlinesGrammar:
    """An index."""

    def __init__(self, library: Any, index: Any, num_blob: int, ends: Ends) -> None:
        self._library, self._index, self._num_blob = library, index, num_blob
        self._ends = ends

    @property
    def num_bytes(self) -> int:
        """An estimate from the binary form: hash maps take several times as much."""
        return 6 * self._num_blob

    def matcher(self) -> OutlinesMatcher:
        """Return a matcher at the start."""
        return OutlinesMatcher(self.guide, self._ends)

    def guide(self) -> Any:
        """Make a guide of outlines_core at the start."""
        return self._library.Guide(self._index, KEPT_FOR_ROLLBACK)


class OutlinesMatcher(EndingMatcher):
    """One request's state: a guide, and the tokens it has taken."""

    def __init__(self, make_guide: Any, ends: Ends) -> None:
        super().__init__(ends)
        self._make_guide = make_guide
        self._guide = make_guide()
        self._taken: list[int] = []

    @property
    def error(self) -> str | None:
        """None: an index cannot fail."""
        return None

    def forced(self) -> list[int]:
        """Follow states that have one token only."""
        if self._terminated or self._guide.is_finished():
            return []
        allowed = self._guide.get_tokens()
        return [int(allowed[0])] if len(allowed) == 1 else []

    def fork(self) -> OutlinesMatcher:
        """Copy, by going the way again: guides share their index only at their start."""
        copy = OutlinesMatcher(self._make_guide, self._ends)
        copy.accept(self._taken)
        copy._terminated = self._terminated
        return copy

    def _complete(self) -> bool:
        return bool(self._guide.is_finished())

    def _fill(self, line: Words) -> None:
        """Write the state's tokens, and in a final state all ends."""
        line[:] = 0
        self._guide.write_mask_into(line.ctypes.data, line.size, line.itemsize)
        line &= ~self._ends.row
        if self._guide.is_finished():
            line |= self._ends.row

    def _advance(self, token_id: int) -> bool:
        try:
            self._guide.advance(token_id, False)
        except ValueError:
            return False
        self._taken.append(token_id)
        return True

    def _retreat(self, num_tokens: int) -> None:
        """Undo; further back than the guide remembers, by going the way again."""
        del self._taken[len(self._taken) - num_tokens :]
        if num_tokens <= self._guide.get_allowed_rollback():
            self._guide.rollback_state(num_tokens)
        else:
            self._guide = self._make_guide()
            for token_id in self._taken:
                self._guide.advance(token_id, False)


def _is_open(source: str) -> bool:
    """Whether some object may have any keys, or some value any type: outlines_core bounds their depth as it likes."""
    root = schema.parse(source)
    if isinstance(root, bool):
        return True
    for _, node in schema.nodes(source):
        if node.get("type") == "array" and not isinstance(node.get("items"), dict):
            return True
        if node.get("type") == "object" and not node.get("properties"):
            return True
        if not any(key in node for key in ("type", "$ref", "anyOf", "const", "enum")):
            return True
    return False
