"""What the author of a grammar backend implements: `GrammarBackend`, and the small objects it returns.

Importing this module imports neither torch nor numpy. A backend is made once per process for one vocabulary; it turns
a `GrammarSpec` into a `CompiledGrammar`, and that into one `GrammarMatcher` per request. Letters: R rows of the mask,
V tokens of the vocabulary (the logits' width), W = ceil(V / 32).

A mask is a host array `[R, W]` of int32: bit `t % 32` of word `t // 32` is 1 where token `t` is allowed. It belongs
to the engine (a view of pinned memory); a backend writes the rows it is given and keeps no reference.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from dovetail.contracts.errors import UnsupportedError
from dovetail.contracts.options import Configurable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Mask = NDArray[np.int32]


class Kind(enum.StrEnum):
    """The languages that a grammar can be written in."""

    JSON = "json"
    """A JSON Schema, as JSON text."""
    JSON_OBJECT = "json_object"
    """Any JSON object; the source is empty."""
    REGEX = "regex"
    """A regular expression that the whole text matches."""
    EBNF = "ebnf"
    """A grammar in the EBNF dialect of GBNF, start rule `root`."""
    LARK = "lark"
    """A grammar in Lark's dialect, start rule `start`."""
    CHOICE = "choice"
    """One of several strings, as a JSON array."""
    STRUCTURAL = "structural"
    """Free text with constrained parts between tags, as JSON text (`{"type": "structural_tag", "format": …}`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """What a text must match. Equal specs share one compiled grammar.

    Attributes:
        kind: The language of `source`.
        source: The grammar, UTF-8 text without NUL, within `GrammarLimits.max_source_bytes`. JSON may escape one.
        strict: The request insists on every keyword; an approximation is refused rather than reported.
        max_whitespace: Most whitespace characters in a row between JSON tokens; None leaves it to the backend.
        whitespace: An expression for what may stand between JSON tokens, in place of `max_whitespace`; a backend that
            cannot answers `Support.no`.
    """

    kind: Kind
    source: str
    strict: bool = False
    max_whitespace: int | None = None
    whitespace: str | None = None


class SupportLevel(enum.Enum):
    """How faithfully a backend enforces a grammar."""

    FULL = "full"
    APPROXIMATE = "approximate"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Support:
    """A backend's answer to `supports`.

    Attributes:
        level: How faithfully the grammar would be enforced.
        ignored: For APPROXIMATE, the keywords not enforced, as JSON pointers (`/properties/a/not`). For FULL, keywords
            that are annotations to the backend, such as a `format` that no draft defines.
        reason: For NONE, why, in one line.
        alone: Keywords that are enforced, but not where this grammar becomes one of several that a text may have.
        source: What `compile` is to get in place of the spec's source, such as it without keywords that would be
            refused; None: as it is.
        origin: Leads a JSON pointer into `source` back into the spec's source, for keywords that are left out while it
            compiles; None: they stand at the same place.
    """

    level: SupportLevel
    ignored: tuple[str, ...] = ()
    reason: str = ""
    alone: tuple[str, ...] = ()
    source: str | None = None
    origin: Callable[[str], str] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def full(cls, annotations: Sequence[str] = ()) -> Support:
        """Return: enforced exactly, but for what says nothing to a validator."""
        return cls(SupportLevel.FULL, tuple(annotations))

    @classmethod
    def approximate(cls, ignored: Sequence[str], source: str | None = None) -> Support:
        """Return: enforced except for `ignored`, where `source` is compiled."""
        return cls(SupportLevel.APPROXIMATE, tuple(ignored), source=source)

    @classmethod
    def no(cls, reason: str) -> Support:
        """Return: not supported, for a reason of one line."""
        return cls(SupportLevel.NONE, reason=reason)

    def to_compile(self, spec: GrammarSpec) -> GrammarSpec:
        """Return what `compile` gets where this was the answer to `spec`."""
        return spec if self.source is None else replace(spec, source=self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Bounds for one compilation. The core enforces time and memory from outside; a backend may stop earlier.

    Attributes:
        max_source_bytes: Size of the source.
        max_nesting: Depth of a JSON source.
        timeout_s: Time for `compile`.
        max_bytes: Size of the compiled grammar.
    """

    max_source_bytes: int = 512 * 1024
    max_nesting: int = 64
    timeout_s: float = 5.0
    max_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens that a backend builds its masks over.

    Attributes:
        tokens: Bytes of each token id; empty for ids that stand for no text (special tokens, padding of the logits).
        size: V, the logits' width; ids from `len(tokens)` on stand for no text.
        eos_ids: Ids that end a text. All are allowed exactly where the grammar accepts.
        special_ids: Ids that never match text, `eos_ids` included.
        fingerprint: Equal for equal vocabularies, also across processes.
        added: Ids of tokens that stand for a text of their own, such as `<tool_call>`: where a structural grammar
            writes that text, this token is meant.
        encode: Text to ids as the model was trained on; None in a compile process.
    """

    tokens: Sequence[bytes]
    size: int
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    fingerprint: str
    added: Mapping[str, int] = field(default_factory=dict)
    encode: Callable[[str], list[int]] | None = None

    @property
    def mask_words(self) -> int:
        """W, words of int32 per row of a mask."""
        return (self.size + 31) // 32


class GrammarMatcher(Protocol):
    """The state of one request in its grammar. Methods never raise: a failure is reported in `error`."""

    @property
    def terminated(self) -> bool:
        """The end token has been accepted; nothing may follow."""
        ...

    @property
    def accepting(self) -> bool:
        """The text so far is complete: the end token is allowed next."""
        ...

    @property
    def error(self) -> str | None:
        """Why the matcher cannot go on, or None. The core ends the request with it."""
        ...

    def fill(self, mask: Mask, row: int) -> bool:
        """Write the allowed next tokens to `mask[row]`, all W words. False: everything is allowed, nothing written."""
        ...

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance over tokens and return how many were accepted; the first refused one and the rest are not taken."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, an end token included."""

    def forced(self) -> list[int]:
        """Return the token ids that must follow because nothing else may; empty where there is a choice."""
        ...

    def fork(self) -> GrammarMatcher:
        """Return an independent copy of the state."""
        ...


class CompiledGrammar(Protocol):
    """A grammar ready for use; immutable, shared by requests."""

    @property
    def num_bytes(self) -> int:
        """Memory held, for the cache's bound; an estimate is enough."""
        ...

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the start of the text."""
        ...


class GrammarBackend(Configurable, ABC):
    """Compiles grammars. Subclass it, name the class in an entry point of `dovetail.grammar_backends.v1`.

    One instance per process and vocabulary. `compile` may run in a process that is killed at the time limit: what it
    returns as bytes is brought back with `load` in the engine. That process is forked from one in which the backend has
    compiled a small grammar, so that its tables are there; threads that it started then are not.
    """

    kinds: frozenset[Kind]
    """The languages that this backend reads."""
    preference: Mapping[Kind, int] = {}
    """How gladly `--grammar-backend auto` takes it, by kind; the highest goes first, 0 where nothing is said."""

    @abstractmethod
    def __init__(self, vocabulary: Vocabulary) -> None:
        """Keep the vocabulary, and build what all grammars share at first use.

        A process that only asks `supports` gives a vocabulary without tokens.
        """

    @classmethod
    def preload(cls) -> None:
        """Import what grammars will need; called in a thread of its own while the model loads. Nothing, by default.

        What is imported under way holds up whoever is being served. It may raise; whoever asks for a grammar is told.
        """

    @abstractmethod
    def supports(self, spec: GrammarSpec) -> Support:
        """Say how faithfully `spec` would be enforced: a cheap walk over the source, no compilation, no exception.

        Name every keyword that would be ignored: a response must never be under-constrained silently. Schemas come
        in keywords of draft 2020-12, with references within the schema only. `title`, `description`, `default` and
        `examples` may occur and constrain nothing. A backend may have another schema compiled that it enforces more
        of: `Support.source`.

        The engine calls this too, when a preferred backend has failed. A schema that passes may still fail in
        `compile`: then the core finds the keywords to drop.
        """

    @abstractmethod
    def compile(self, spec: GrammarSpec, limits: GrammarLimits) -> CompiledGrammar | bytes:
        """Compile a grammar. Return bytes where the result can travel between processes.

        Raises:
            RequestError: The source is wrong or too large; the message names the place. Where bytes are returned,
                `load` may raise it instead: it follows in the same process.
        """

    def inline(self, spec: GrammarSpec) -> bool:
        """Whether `compile` of `spec` is known to be fast, and releases the GIL: then it runs in the engine.

        Otherwise it runs in a process that can be killed, which also loads the result, to see what that costs. What
        returns no bytes there is compiled again in the engine, once the other process has shown what that costs.
        """
        return False

    def load(self, blob: bytes) -> CompiledGrammar:
        """Bring back what `compile` returned as bytes, in a process with the same vocabulary.

        Raises:
            UnsupportedError: This backend compiles to objects only.
        """
        raise UnsupportedError(f"{type(self).__name__}.compile returns objects, not bytes; there is nothing to load")

    def warm_up(self, grammar: CompiledGrammar, timeout_s: float) -> None:
        """Prepare what the matchers of a grammar will soon need, for at most about `timeout_s`.

        Called once for each grammar that came into force, in a thread beside the engine, while its first request
        prefills. Override it where first visits are slow.
        """
        return

    def known(self, matcher: GrammarMatcher) -> tuple[Hashable, Mask] | None:
        """Return the mask of a matcher's next token where it is at hand, so that a device may keep it; None: fill it.

        A key stands for the mask: of two matchers of this backend with equal keys, whatever they are of, the masks are
        equal, now and later. The words, `[W]`, are only read, and before the next call of `fill_batch`.
        """
        return None

    def fill_batch(self, matchers: Sequence[GrammarMatcher], mask: Mask, rows: Sequence[int]) -> list[bool]:
        """Fill one row per matcher in one call and return what `fill` returned for each. Override where faster."""
        return [matcher.fill(mask, row) for matcher, row in zip(matchers, rows, strict=True)]
