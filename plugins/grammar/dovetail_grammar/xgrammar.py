"""`xgrammar`: grammars by the xgrammar library (a pushdown automaton with precomputed masks).

Masks are cheap, compiling is not: it always runs in a process of its own, and the result travels in the library's JSON
form. Of JSON Schema the library enforces a part and ignores the rest in silence (`not`, `if`, `uniqueItems`,
`multipleOf`, `contains`, siblings of `anyOf` and `$ref`, …), so only a tested subset is called FULL.

Defined by xgrammar 0.2's documentation. Not in the default install: `pip install dovetail-llm[xgrammar]`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import (
    CompiledGrammar,
    GrammarLimits,
    GrammarSpec,
    Kind,
    Support,
)
from dovetail_grammar.choices import read_choices
from dovetail_grammar.patterns import has_inner_anchors, has_unknown_escapes, is_unreadable, strip_anchors
from dovetail_grammar.schema_backend import SchemaBackend, import_library
from dovetail_grammar.schema_subset import Subset

if TYPE_CHECKING:
    from dovetail.contracts.grammar import Mask

MAX_WHITESPACE = 20
MAX_TWICE_S = 0.1
"""Processor time of a compilation that is done once more in the engine."""
_MISREAD = re.compile(r"(?<!\\)(?:\\\\)*(?:\\[WDS]|\[\^?\])|\[\^(?:\\.|[^\]\\])*\\[wds]", re.DOTALL)
_OUTSIDE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\.", re.DOTALL)
"""Escapes, classes, and what stands for any character but a line's end, which the library lets through."""
_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
SUBSET = Subset(
    by_type={
        "object": frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties")),
        "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
        "string": frozenset(("pattern", "format")),  # between lengths it lets raw control characters through
        "integer": _NUMBERS,
        "number": _NUMBERS,
    },
    formats=frozenset(("date", "email")),
    keys_are_known=False,
)


class XgrammarBackend(SchemaBackend):
    """See the module."""

    # No structural tags: where they name an added token, its name could be spelled out in other tokens.
    kinds = frozenset((Kind.JSON, Kind.JSON_OBJECT, Kind.REGEX, Kind.EBNF, Kind.CHOICE))
    preference = dict.fromkeys(kinds, 50)

    def library_supports(self, spec: GrammarSpec) -> Support:
        """FULL for what is known to be enforced; all else is named."""
        if spec.whitespace is not None:
            return Support.no("whitespace is bounded by a number only")
        if spec.kind is Kind.JSON:
            return SUBSET.support(spec)
        if spec.kind is Kind.REGEX and (has_inner_anchors(spec.source) or is_unreadable(spec.source)):
            return Support.no("anchors within an expression, look-around and back-references are ignored")
        if spec.kind is Kind.REGEX and has_unknown_escapes(spec.source):
            return Support.no("of escaped letters that it does not know it takes the letter itself")
        if spec.kind is Kind.REGEX and _MISREAD.search(spec.source):
            return Support.no(
                r"what is no \w, \d or \s is of ASCII to it, and a bracket that is first in a class its end"
            )
        return Support.full()

    def library_compile(self, spec: GrammarSpec, limits: GrammarLimits) -> CompiledGrammar | bytes:
        """Compile. What takes long returns in the library's JSON form, which takes four times as long to write.

        What does not is compiled a second time where it is used: that holds up others' tokens for less time than
        reading the form.
        """
        library, info = self._shared()
        compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        began = time.thread_time()
        try:
            compiled = _compile(library, compiler, spec)
        except RuntimeError as error:
            raise RequestError(f"the grammar cannot be compiled: {_last_part(error)}", code=_code(spec)) from None
        if time.thread_time() - began < MAX_TWICE_S:
            return XgrammarGrammar(library, compiled, self._vocabulary.size)
        return str(compiled.serialize_json()).encode()

    def library_load(self, blob: bytes) -> CompiledGrammar:
        """Read what `compile` wrote."""
        library, info = self._shared()
        return XgrammarGrammar(
            library, library.CompiledGrammar.deserialize_json(blob.decode(), info), self._vocabulary.size
        )

    @classmethod
    def preload(cls) -> None:
        """Import the library, which takes a second."""
        import_library("xgrammar", "xgrammar")

    def library_shared(self) -> tuple[Any, Any]:
        """Import the library, which brings torch along, and make its tokenizer."""
        library, v = import_library("xgrammar", "xgrammar"), self._vocabulary
        tokens = [b"" if i in v.special_ids else token for i, token in enumerate(v.tokens)]
        tokens += [b""] * (v.size - len(tokens))  # an end behind the last token would be forgotten
        info = library.TokenizerInfo(tokens, library.VocabType.RAW, vocab_size=v.size, stop_token_ids=sorted(v.eos_ids))
        return library, info


class XgrammarGrammar:
    """A compiled grammar."""

    def __init__(self, library: Any, compiled: Any, size: int) -> None:
        self._library, self._compiled = library, compiled
        self._tail = (1 << size % 32) - 1 if size % 32 else 0

    @property
    def num_bytes(self) -> int:
        """As the library counts."""
        return int(self._compiled.memory_size_bytes)

    def matcher(self) -> XgrammarMatcher:
        """Return a matcher at the start."""
        return XgrammarMatcher(self._library.GrammarMatcher(self._compiled), self._tail)


class XgrammarMatcher:
    """One request's state."""

    def __init__(self, inner: Any, tail: int) -> None:
        self._inner, self._tail = inner, tail
        self._error: str | None = None

    @property
    def terminated(self) -> bool:
        """An end has been accepted."""
        return bool(self._inner.is_terminated())

    @property
    def accepting(self) -> bool:
        """The text is complete."""
        return not self.terminated and bool(self._inner.is_completed())

    @property
    def error(self) -> str | None:
        """What the library raised."""
        return self._error

    def fill(self, mask: Mask, row: int) -> bool:
        """Compute the mask in place."""
        if self.terminated:
            mask[row] = 0
            return True
        import torch  # what the library writes to; it has been imported with it

        try:
            needed = bool(self._inner.fill_next_token_bitmask(torch.from_numpy(mask), row))
        except RuntimeError as error:
            self._error = _last_part(error)
            mask[row] = 0
            return True
        if self._tail:
            mask[row, -1] &= self._tail  # the library sets bits behind the last token, too
        return needed

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance."""
        for count, token_id in enumerate(token_ids):
            if self.terminated or not self._inner.accept_token(token_id):
                return count
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Undo."""
        if num_tokens:
            self._inner.rollback(num_tokens)

    def forced(self) -> list[int]:
        """The library knows forced text, not how the tokenizer cuts it."""
        return []

    def fork(self) -> XgrammarMatcher:
        """Copy."""
        return XgrammarMatcher(self._inner.fork(), self._tail)


def _compile(library: Any, compiler: Any, spec: GrammarSpec) -> Any:
    if spec.kind in (Kind.JSON, Kind.JSON_OBJECT):
        source = spec.source if spec.kind is Kind.JSON else '{"type": "object"}'
        most = MAX_WHITESPACE if spec.max_whitespace is None else spec.max_whitespace
        return compiler.compile_json_schema(
            source,
            strict_mode=False,
            any_whitespace=most > 0,
            max_whitespace_cnt=most or None,
            separators=None if most else (",", ":"),
        )
    if spec.kind is Kind.REGEX:
        return compiler.compile_regex(
            _OUTSIDE.sub(lambda found: r"[^\n]" if found[0] == "." else found[0], strip_anchors(spec.source))
        )
    if spec.kind is Kind.CHOICE:
        choices = " | ".join(json.dumps(choice) for choice in read_choices(spec.source))
        return compiler.compile_grammar(f"root ::= {choices}")
    return compiler.compile_grammar(library.Grammar.from_ebnf(spec.source))


def _code(spec: GrammarSpec) -> str:
    return "unsupported_grammar" if spec.kind is Kind.JSON else "invalid_grammar"


def _last_part(error: Exception) -> str:
    """The library's messages begin with a time and a place in its source."""
    return str(error).strip().rsplit(": ", 1)[-1][:300]
