"""`SchemaBackend`: what the backends share that read JSON Schemas.

A schema is rewritten so that a library enforces more of it (`rewriting`), and what the library refuses is left out.

No grammar can say `uniqueItems`, and the libraries ignore or refuse it. So it is left out of what a library compiles,
and its matchers are watched (`unique`). What cannot be watched is named as ignored, as the library says.
"""

from __future__ import annotations

import json
import threading
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any

from dovetail.contracts.errors import PluginError
from dovetail.contracts.grammar import (
    CompiledGrammar,
    GrammarBackend,
    GrammarLimits,
    GrammarMatcher,
    GrammarSpec,
    Kind,
    Support,
    SupportLevel,
    Vocabulary,
)
from dovetail.sdk.masks import Words
from dovetail.sdk.schemas.schema import every, leave_out
from dovetail.sdk.schemas.structural import schemas_with_places
from dovetail_grammar.choices import UNREADABLE
from dovetail_grammar.matching import Ends
from dovetail_grammar.rewriting.form import SchemaForm, form_of
from dovetail_grammar.unique.locations import KEY, unique_places
from dovetail_grammar.unique.matcher import UniqueGrammar, UniqueMatcher
from dovetail_grammar.unique.tags import watched_tags
from dovetail_grammar.unique.tokens import TokenTexts

HEADER_BYTES = 4
"""Of what `compile` returns: how long what is watched is, which follows, before the library's own form."""
MAX_ROUNDS = 3
"""How often a source from which something was left out is looked at again."""
NUM_KEPT = 4
"""Grammars of which it is kept what is watched: those that are just being compiled."""


@dataclass(frozen=True, slots=True)
class LibrarySupport(Support):
    """What a library enforces of a source; `refused` are those of `ignored` with which it would not compile it."""

    refused: tuple[str, ...] = ()


class SchemaBackend(GrammarBackend):
    """A backend of a library that does not enforce `uniqueItems`.

    What a subclass implements is called as in `GrammarBackend`, behind `library_`: it gets sources without the keyword
    where that is watched, and its own grammars.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Keep the vocabulary."""
        self._vocabulary = vocabulary
        self._token_texts = TokenTexts(vocabulary)
        self._lock = threading.Lock()
        self._made: Any = None

    @cached_property
    def _ends(self) -> Ends:
        """The tokens that end a reply."""
        return Ends.of(self._vocabulary)

    def _shared(self) -> Any:
        """Return what `library_shared` made at the first call."""
        with self._lock:
            if self._made is None:
                self._made = self.library_shared()
            return self._made

    @abstractmethod
    def library_shared(self) -> Any:
        """Make what all grammars share: the library's own form of the vocabulary."""

    @abstractmethod
    def library_supports(self, spec: GrammarSpec) -> Support:
        """As `supports`, of a source as it stands; it may be a `LibrarySupport`, and raise `UNREADABLE`."""

    @abstractmethod
    def library_compile(self, spec: GrammarSpec, limits: GrammarLimits) -> CompiledGrammar | bytes:
        """As `compile`."""

    @abstractmethod
    def library_load(self, blob: bytes) -> CompiledGrammar:
        """As `load`."""

    def library_inline(self, spec: GrammarSpec) -> bool:
        """As `inline`."""
        return False

    def library_warm_up(self, grammar: CompiledGrammar, timeout_s: float) -> None:
        """As `warm_up`."""

    def supports(self, spec: GrammarSpec) -> Support:
        """Say what is enforced of a source: it is rewritten, and what the library refuses is left out of it."""
        if spec.kind not in self.kinds:
            return Support.no(f"does not read {spec.kind}")
        try:
            form = form_of(spec.source) if spec.kind is Kind.JSON else SchemaForm(spec.source)
            tried = spec if form.source is spec.source else replace(spec, source=form.source)
            ignored, alone = list[str](), list[str]()
            for _ in range(MAX_ROUNDS):
                plain, _, places, lost = divided(tried)
                support = self.library_supports(plain)
                if support.level is SupportLevel.NONE:
                    return support
                alone += map(form.place, places)
                ignored += map(form.place, support.ignored if support.level is SupportLevel.APPROXIMATE else ())
                ignored += map(form.place, lost)
                if not (isinstance(support, LibrarySupport) and support.refused):
                    break
                left = leave_out(json.loads(tried.source), support.refused)
                tried = replace(tried, source=json.dumps(left, ensure_ascii=False))
        except UNREADABLE as error:
            return Support.no(f"it cannot be read: {error}")
        annotations = () if ignored else map(form.place, support.ignored)
        return Support(
            SupportLevel.APPROXIMATE if ignored else SupportLevel.FULL,
            tuple(dict.fromkeys((*ignored, *annotations))),
            alone=tuple(dict.fromkeys(alone)),
            source=None if tried.source is spec.source else tried.source,
            origin=form.place,
        )

    def inline(self, spec: GrammarSpec) -> bool:
        """Answer for what the library will compile."""
        return self.library_inline(divided(spec)[0])

    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> CompiledGrammar | bytes:
        """Compile what the library reads; what is watched stands before its own form."""
        plain, watched, *_ = divided(spec)
        made = self.library_compile(plain, limits)
        if isinstance(made, bytes):
            head = watched.encode()
            return len(head).to_bytes(HEADER_BYTES, "big") + head + made
        if watched:
            self._token_texts.prepare()
        return self._watched(made, watched)

    def load(self, blob: bytes) -> CompiledGrammar:
        """Load the library's form."""
        end = HEADER_BYTES + int.from_bytes(blob[:HEADER_BYTES], "big")
        return self._watched(self.library_load(blob[end:]), blob[HEADER_BYTES:end].decode())

    def warm_up(self, grammar: CompiledGrammar, timeout_s: float) -> None:
        """Prepare what is watched, and the library's grammar."""
        if isinstance(grammar, UniqueGrammar):
            self._token_texts.prepare()
            grammar = grammar.inner
        self.library_warm_up(grammar, timeout_s)

    def _watched(self, grammar: CompiledGrammar, watched: str) -> CompiledGrammar:
        return UniqueGrammar(grammar, json.loads(watched), self._token_texts) if watched else grammar


def import_library(backend: str, *modules: str) -> Any:
    """Import the modules of a backend's library and return the first.

    Raises:
        PluginError: It is not installed.
    """
    try:
        first, *_ = [import_module(name) for name in modules]
    except ImportError as error:
        raise PluginError(f"grammar backend {backend!r}: {error}; run: pip install {modules[0]}") from None
    return first


def inner_matchers(matchers: Sequence[GrammarMatcher]) -> list[GrammarMatcher]:
    """Return the library's matchers of some that may be watched."""
    return [matcher.inner if isinstance(matcher, UniqueMatcher) else matcher for matcher in matchers]


def narrow(matchers: Sequence[GrammarMatcher], mask: Words, rows: Sequence[int]) -> None:
    """Take tokens out of rows that were filled by `inner_matchers`, where a matcher is watched."""
    for matcher, row in zip(matchers, rows, strict=True):
        if isinstance(matcher, UniqueMatcher):
            matcher.narrow(mask[row])


@lru_cache(maxsize=NUM_KEPT)
def divided(spec: GrammarSpec) -> tuple[GrammarSpec, str, tuple[str, ...], tuple[str, ...]]:
    """Divide a grammar into what a library compiles and what is watched.

    Returns:
        The grammar without what is watched; that as JSON, empty for nothing; its places; and places of what was left
        out besides, which is not enforced.
    """
    nothing = spec, "", (), ()
    if spec.kind not in (Kind.JSON, Kind.STRUCTURAL) or f'"{KEY}"' not in spec.source:
        return nothing
    try:
        root = json.loads(spec.source)
        watched, found = unique_places(root) if spec.kind is Kind.JSON else watched_tags(root)
        everywhere = _everywhere(root) if spec.kind is Kind.STRUCTURAL else sorted(found)
    except UNREADABLE:
        return nothing  # the library says what is wrong with it
    if not everywhere:
        return nothing
    plain = replace(spec, source=json.dumps(leave_out(root, everywhere), ensure_ascii=False))
    places, lost = ([at for at in everywhere if (at in found) is is_found] for is_found in (True, False))
    return plain, json.dumps(watched, ensure_ascii=False) if places else "", tuple(places), tuple(lost)


def _everywhere(root: Any) -> list[str]:
    """Return the places of a structural grammar that ask for differing items; none is of text."""
    return [
        f"{start}{pointer}/{KEY}"
        for start, held in schemas_with_places(root, but="text")
        for pointer, node in every(held)
        if isinstance(node, dict) and node.get(KEY) is True
    ]
