r"""`llguidance`: grammars by the llguidance library (an Earley parser over a lazy lexer).

It reads all kinds. JSON Schema is enforced exactly or refused: what it does not implement is an error, never ignored,
unless the spec relaxes it. Formats it does not know are annotations, as JSON Schema says they are by default.

Defined by llguidance's docs/json_schema.md and docs/syntax.md (1.9).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

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
from dovetail.errors import PluginError, RequestError
from dovetail.grammar.bits import Words, new_row
from dovetail.grammar.structural import schemas_in
from dovetail_grammar.choices import UNREADABLE
from dovetail_grammar.llguidance_schema import SchemaWalk, prepare_schema
from dovetail_grammar.llguidance_source import to_llguidance

if TYPE_CHECKING:
    from dovetail.contracts.grammar import Mask

MAX_WHITESPACE = 20
"""Whitespace characters in a row between JSON tokens: enough for indented JSON, not for a model that runs away."""
MAX_INLINE = 32 * 1024
MAX_TOKEN = 32
MAX_INLINE_EBNF = 2 * 1024
_INVALID = re.compile(r"Unsatisfiable|does not exist|Invalid type|unknown name|not found|Expected|[Pp]arse|token")
"""Errors that no other backend would see differently."""
LIMITS: dict[str, Any] = {"step_lexer_fuel": 100_000, "step_max_items": 30_000, "verbose_errors": False}


class LlguidanceBackend(GrammarBackend):
    """See the module."""

    kinds = frozenset(Kind)
    preference = dict.fromkeys(Kind, 100)

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Keep the vocabulary; the library's own tokenizer is made at first use."""
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._executor: Any = None
        self._library = import_library()

    def supports(self, spec: GrammarSpec) -> Support:
        """Walk JSON Schemas for what the library does not implement; other kinds it reads in full."""
        try:
            return self._supports(spec)
        except UNREADABLE as error:
            return Support.no(f"it cannot be read: {error}")

    def _supports(self, spec: GrammarSpec) -> Support:
        if spec.kind is Kind.JSON:
            return SchemaWalk(spec).support()
        if spec.kind is Kind.STRUCTURAL:
            return _structural_support(spec)
        return Support.full()

    def inline(self, spec: GrammarSpec) -> bool:
        """The library bounds its own work and releases the GIL; rewriting a large source in Python does neither."""
        return len(spec.source) <= (MAX_INLINE_EBNF if spec.kind is Kind.EBNF else MAX_INLINE)

    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> CompiledGrammar | bytes:
        """Compile. A large source returns as the library's form of it, tried out."""
        try:
            source = to_llguidance(self._library, self._prepared(spec), self._vocabulary)
        except ValueError as error:
            raise RequestError(f"the grammar cannot be read: {error}", code="invalid_grammar") from None
        compiled = self._build(source)
        return compiled if self.inline(spec) else source.encode()

    def load(self, blob: bytes) -> CompiledGrammar:
        """Build from the library's form."""
        return self._build(blob.decode())

    def _build(self, source: str) -> LlguidanceGrammar:
        """Build, and compute the first mask, so that the lexer's first states are made outside the engine's loop."""
        library = self._library
        matcher = library.LLMatcher(self._shared(), source, log_level=0, limits=library.LLParserLimits(**LIMITS))
        if error := matcher.get_error():
            code = "invalid_grammar" if _INVALID.search(error) else "unsupported_grammar"
            raise RequestError(f"the grammar cannot be enforced: {_first_line(error)}", code=code)
        compiled = LlguidanceGrammar(self, matcher, len(source))
        probe = compiled.matcher()
        row = np.zeros((1, self._vocabulary.mask_words), dtype=np.int32)
        probe.fill(row, 0)
        if probe.error is not None:
            raise RequestError(f"the grammar cannot be enforced: {probe.error}", code="unsupported_grammar")
        compiled.base = probe.inner
        return compiled

    def fill_batch(self, matchers: Sequence[GrammarMatcher], mask: Mask, rows: Sequence[int]) -> list[bool]:
        """Fill the rows one by one: a call takes microseconds, and threads would only wake up for it."""
        return [matcher.fill(mask, row) for matcher, row in zip(matchers, rows, strict=True)]

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary."""
        return self._vocabulary

    def _prepared(self, spec: GrammarSpec) -> GrammarSpec:
        if spec.kind is not Kind.JSON and spec.kind is not Kind.JSON_OBJECT:
            return spec
        return prepare_schema(spec, MAX_WHITESPACE if spec.max_whitespace is None else spec.max_whitespace)

    def _shared(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = make_tokenizer(self._library, self._vocabulary)
            return self._tokenizer


class LlguidanceGrammar:
    """A compiled grammar: a matcher at its start, of which each request gets a copy."""

    def __init__(self, backend: LlguidanceBackend, base: Any, num_source: int) -> None:
        self.base = base
        self._backend = backend
        self._eos_row = new_row(backend.vocabulary.size, (i for i in backend.vocabulary.eos_ids))
        self._num_source = num_source

    @property
    def num_bytes(self) -> int:
        """An estimate: the library does not say."""
        return 64 * 1024 + 24 * self._num_source

    def matcher(self) -> LlguidanceMatcher:
        """Return a matcher at the start."""
        return LlguidanceMatcher(self.base.deep_copy(), self._backend.vocabulary.eos_ids, self._eos_row)


class LlguidanceMatcher:
    """One request's state. Ends of the reply are kept here: the library stops by itself where nothing may follow."""

    def __init__(self, inner: Any, eos_ids: frozenset[int], eos_row: Words, *, terminated: bool = False) -> None:
        self.inner = inner
        self._eos_ids = eos_ids
        self._eos_row = eos_row
        self._terminated = terminated

    @property
    def terminated(self) -> bool:
        """An end has been accepted."""
        return self._terminated

    @property
    def accepting(self) -> bool:
        """The text is complete."""
        return not self._terminated and bool(self.inner.is_accepting())

    @property
    def error(self) -> str | None:
        """The library's error."""
        return _first_line(self.inner.get_error()) if self.inner.is_error() else None

    def fill(self, mask: Mask, row: int) -> bool:
        """Compute the mask in place; at an end that nothing can follow, only ends are allowed."""
        line = mask[row]
        if self._terminated or self.inner.is_stopped():
            line[:] = self._eos_row
            return True
        self.inner.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        if self.inner.is_error():
            line[:] = 0
        return True

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance."""
        for count, token_id in enumerate(token_ids):
            if self._terminated:
                return count
            if token_id in self._eos_ids:
                if not self.inner.is_accepting():
                    return count
                self._terminated = True
            elif self.inner.is_stopped() or not self.inner.try_consume_tokens([token_id]):
                return count
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Undo."""
        if num_tokens and self._terminated:
            self._terminated = False
            num_tokens -= 1
        if num_tokens:
            self.inner.rollback(num_tokens)

    def forced(self) -> list[int]:
        """Ask the library, which knows how the tokenizer cuts text."""
        if self._terminated or self.inner.is_stopped():
            return []
        tokens: list[int] = self.inner.compute_ff_tokens()
        return tokens

    def fork(self) -> LlguidanceMatcher:
        """Copy."""
        return LlguidanceMatcher(self.inner.deep_copy(), self._eos_ids, self._eos_row, terminated=self._terminated)


class _Wrapped:
    """The vocabulary as llguidance asks for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = {token_id: text.encode() for text, token_id in vocabulary.added.items()}
        tokens = list(vocabulary.tokens) + [b""] * (vocabulary.size - len(vocabulary.tokens))
        for token_id in vocabulary.special_ids:
            tokens[token_id] = names.get(token_id, b"<|special_%d|>" % token_id)
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = None
        self.tokens = tokens
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode
        self._longest: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        """Encode. Without the model's encoder, by the longest token that fits."""
        if self._encode is not None:
            return self._encode(text)
        if not self._longest:
            self._longest = {token: token_id for token_id, token in enumerate(self.tokens) if token}
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            end = next(end for end in range(min(len(data), at + MAX_TOKEN), at, -1) if data[at:end] in self._longest)
            ids.append(self._longest[data[at:end]])
            at = end
        return ids


def _structural_support(spec: GrammarSpec) -> Support:
    """Join the answers for all schemas in a structural grammar."""
    ignored: list[str] = []
    for schema in schemas_in(json.loads(spec.source)):
        inner = GrammarSpec(kind=Kind.JSON, source=json.dumps(schema), relax=spec.relax)
        support = SchemaWalk(inner).support()
        if support.level is SupportLevel.NONE:
            return support
        ignored += support.ignored
    return Support.approximate(ignored) if ignored else Support.full()


def make_tokenizer(library: Any, vocabulary: Vocabulary) -> Any:
    """Make the library's tokenizer.

    Raises:
        PluginError: The vocabulary has no token that ends a reply.
    """
    if not vocabulary.eos_ids:
        raise PluginError(
            "the model names no end-of-sequence token, which grammars need; set eos_token_id in config.json"
        )
    wrapped = library.TokenizerWrapper(_Wrapped(vocabulary))
    return library.LLTokenizer(wrapped, n_vocab=vocabulary.size, eos_token=sorted(vocabulary.eos_ids))


def import_library() -> Any:
    """Import llguidance.

    Raises:
        PluginError: It is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise PluginError(f"grammar backend 'llguidance': {error}; run: pip install llguidance") from None
    return llguidance


def _first_line(error: str) -> str:
    """The library's messages end with lines for its developers, and a regex error points below its line."""
    lines = [line.strip() for line in error.splitlines() if line.strip() and "non-verbose" not in line]
    return " ".join(lines)[:300]
