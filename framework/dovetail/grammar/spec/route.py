"""Which backend enforces a request's grammar, and how faithfully: its options, and the report of what came of it.

The options of a request go to the engine in this order, and the first that compiles is enforced:

1. a backend that enforces the grammar in full, the one that likes its kind most first;
2. one that enforces it but for what it names, and may leave out more (`relax_schema`): the one that ignores least
   first, and of those that ignore as much the preferred one;
3. any JSON value of the schema's outermost types.

From the second on the finished text is validated, and the reply says so. Nothing is under-constrained without a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind, Support, SupportLevel
from dovetail.grammar.spec.advice import advice
from dovetail.grammar.spec.normal import Normal, normalize
from dovetail.grammar.spec.wire import option_of, spec_of
from dovetail.messages import GrammarOption
from dovetail.sdk.schemas import schema

# Asking a backend what it enforces of a schema, and leading its places back to the schema as it was given.
#
# The router asks the backend that likes schemas most. Where that one enforces all of it, the engine asks the others, if
# ever their turn comes: their answers take longer than the first one's way to a first token may.

PlaceMap = Callable[[str], str]
"""Leads a JSON pointer into one text of a schema to where the same stood in another."""


@dataclass(frozen=True, slots=True)
class SchemaOffer:
    """A schema as one backend enforces it.

    Attributes:
        source: What it compiles.
        ignored: Places in the given schema that are not enforced.
        annotations: Places that say nothing to a validator.
        place: Leads a place in `source` to the given schema.
        reason: Why the backend cannot enforce it at all; empty where it can.
        alone: Of what is enforced, places in the given schema that are not where the text may have another grammar.
    """

    source: str
    ignored: tuple[str, ...]
    annotations: tuple[str, ...]
    place: PlaceMap
    reason: str = ""
    alone: tuple[str, ...] = ()

    @property
    def schema(self) -> Any:
        """What it compiles, read; not to be changed."""
        return schema.parse(self.source)


def offered(backend: GrammarBackend, normal: Normal, spec: GrammarSpec) -> SchemaOffer:
    """Return what a backend makes of a schema.

    Args:
        backend: It.
        normal: The schema.
        spec: It as text, and what else is asked for.
    """
    support = backend.supports(spec)
    origin = support.origin or str
    ignored = dict.fromkeys((*normal.dropped, *map(normal.place, _ignored(support))))
    is_full = support.level is SupportLevel.FULL
    return SchemaOffer(
        support.to_compile(spec).source,
        tuple(ignored),
        tuple(map(normal.place, support.ignored)) if is_full else (),
        lambda pointer: normal.place(origin(pointer)),
        support.reason if support.level is SupportLevel.NONE else "",
        tuple(dict.fromkeys(map(normal.place, support.alone))),
    )


def asked(backend: GrammarBackend, option: GrammarOption) -> tuple[GrammarOption, tuple[str, ...], PlaceMap] | None:
    """Ask the backend of an option that nobody has asked yet.

    Returns:
        The option as the backend enforces it, places of its source that are not enforced, and what leads there from
        places of the new source; None where the backend does not take it, or not in full where `relax_schema` does not
        allow less.
    """
    spec = spec_of(option)
    support = backend.supports(spec)
    ignored = _ignored(support)
    if support.level is SupportLevel.NONE or (ignored and not option.relax_schema):
        return None
    source = support.to_compile(spec).source
    return msgspec.structs.replace(option, source=source, unasked=False), ignored, support.origin or str


def _ignored(support: Support) -> tuple[str, ...]:
    return support.ignored if support.level is SupportLevel.APPROXIMATE else ()


Enforcement = Literal["full", "approximate", "validate_only"]
MAX_KEPT = 256
"""Last options whose backend is kept: one for each list of types and kind of whitespace."""

MAX_WEAKER = 2
"""Options of different backends that are not full: each travels with its source."""


@dataclass(frozen=True, slots=True)
class EnforcementOption:
    """One option, and what it means for the reply.

    Attributes:
        grammar: What the engine gets.
        enforcement: As far as is known before it compiles.
        ignored: Places in the given schema that it does not enforce.
        place: Leads a place in the option's source to what was given.
        alone: Places that it enforces, but not where the text may have another grammar instead.
    """

    grammar: GrammarOption
    enforcement: Enforcement
    ignored: tuple[str, ...]
    place: PlaceMap = field(default=str, compare=False, repr=False)
    alone: tuple[str, ...] = ()

    def with_left_out(self, places: Sequence[str]) -> tuple[Enforcement, tuple[str, ...]]:
        """Return enforcement and what is ignored, now that places of the option's source were left out, too."""
        if not places or self.enforcement == "validate_only":
            return self.enforcement, self.ignored
        return "approximate", tuple(dict.fromkeys((*self.ignored, *map(self.place, places))))


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool that a grammar lets the model call.

    Attributes:
        name: Its name.
        source: The JSON schema of its arguments, as given.
        place: Pointer to that in the request.
    """

    name: str
    source: str
    place: str


@dataclass(frozen=True, slots=True)
class GrammarRoute:
    """All options to enforce a request's grammar, best first.

    Attributes:
        spec: The grammar as asked for; where there are tools, that of the text beside the calls.
        options: In the order they are tried.
        param: The request's field.
        tools: Those that it lets the model call.
    """

    spec: GrammarSpec
    options: tuple[EnforcementOption, ...]
    param: str
    tools: tuple[ToolSchema, ...] = ()

    @property
    def engine_options(self) -> tuple[GrammarOption, ...]:
        """What the engine gets."""
        return tuple(option.grammar for option in self.options)

    def needs_validation(self, option: int, left_out: Sequence[str] = ()) -> bool:
        """Whether what came of this option has to be judged."""
        enforcement, _ = self.options[option].with_left_out(left_out)
        return enforcement != "full" and (self.spec.kind is Kind.JSON or bool(self.tools))


@dataclass(slots=True)
class GrammarRouter:
    """Chooses options among the backends of a process.

    Attributes:
        backends: By name, in the plan's order.
        strict_schema: Refuse a `strict` schema that cannot be enforced in full.
        enforced_only: Refuse a schema that would only be judged: there is no option of any JSON.
        compact: JSON has no whitespace between its tokens, where a request says nothing of it.
    """

    backends: Mapping[str, GrammarBackend]
    strict_schema: bool = False
    enforced_only: bool = False
    compact: bool = False
    _any_json: dict[GrammarSpec, GrammarOption | None] = field(default_factory=dict, init=False)

    def able(self, kind: Kind, param: str) -> list[tuple[str, GrammarBackend]]:
        """Return the backends that read a kind of grammar, the one that likes it most first.

        Raises:
            RequestError: There is none.
        """
        by_preference = sorted(self.backends.items(), key=lambda item: -item[1].preference.get(kind, 0))
        able = [(name, backend) for name, backend in by_preference if kind in backend.kinds]
        if not able:
            raise self._no_backend(kind, param)
        return able

    def route(self, spec: GrammarSpec, param: str, *, asks_all: bool = False) -> GrammarRoute:
        """Return the options for a grammar that `check_spec` has passed.

        Args:
            spec: The grammar.
            param: The request's field.
            asks_all: Ask every backend now, though the first enforces all of a schema.

        Raises:
            RequestError: No backend reads this kind, or strictness forbids what would remain.
        """
        able = self.able(spec.kind, param)
        spec = self.spaced(spec)
        if spec.kind is Kind.JSON:
            return self._route_schema(spec, param, able, asks_all=asks_all)
        answers = [(name, backend.supports(spec)) for name, backend in able]
        options = [
            EnforcementOption(option_of(name, support.to_compile(spec)), "full", support.ignored)
            for name, support in answers
            if support.level is SupportLevel.FULL
        ]
        partial = [(name, support) for name, support in answers if support.level is SupportLevel.APPROXIMATE]
        for name, support in sorted(partial, key=lambda item: len(item[1].ignored)):
            weaker = option_of(name, support.to_compile(spec), relax_schema=True)
            options.append(EnforcementOption(weaker, "approximate", support.ignored, support.origin or str))
        if spec.kind is Kind.STRUCTURAL:
            full = [option for option in options if option.enforcement == "full"]
            options += [replace(one, grammar=msgspec.structs.replace(one.grammar, relax_schema=True)) for one in full]
        if not options:
            raise unenforceable(param, [(name, support.reason) for name, support in answers])
        return GrammarRoute(spec, tuple(options), param)

    def spaced(self, spec: GrammarSpec) -> GrammarSpec:
        """Return a grammar with the server's whitespace, where it says nothing of it."""
        is_said = spec.max_whitespace is not None or spec.whitespace is not None
        return replace(spec, max_whitespace=0) if self.compact and not is_said else spec

    def _route_schema(
        self, spec: GrammarSpec, param: str, able: Sequence[tuple[str, GrammarBackend]], *, asks_all: bool
    ) -> GrammarRoute:
        normal = normalize(schema.parse(spec.source), spec.source)
        read = spec if normal.source is spec.source else replace(spec, source=normal.source)
        is_strict = spec.strict and self.strict_schema
        found: list[tuple[str, SchemaOffer]] = []
        for name, backend in able:
            found.append((name, offered(backend, normal, read)))
            if not (found[-1][1].reason or found[-1][1].ignored or is_strict or asks_all):
                break
        others = [name for name, _ in able[len(found) :]]
        possible = [(name, item) for name, item in found if not item.reason]
        full = [(name, item) for name, item in possible if not item.ignored]
        if is_strict:
            strict = [(name, item) for name, item in full if not item.annotations]
            if not strict:
                raise not_strict(param, [item for _, item in found])
            return GrammarRoute(spec, tuple(_option(name, item, spec) for name, item in strict), param)
        options = [_option(name, item, spec) for name, item in full]
        options += [_unasked(name, normal, read) for name in others]
        nearest = sorted(possible, key=lambda pair: len(pair[1].ignored))[:MAX_WEAKER]
        options += [_option(name, item, spec, relax_schema=True) for name, item in nearest]
        options += [_unasked(name, normal, read, relax_schema=True) for name in others[: MAX_WEAKER - len(nearest)]]
        any_json = None
        if not self.enforced_only:
            any_json = self._of_any_json(replace(spec, source=json.dumps({"type": outer_types(spec.source)})), able)
        if any_json is not None:
            options.append(EnforcementOption(any_json, "validate_only", ("/",)))
        if not options:
            raise unenforceable(param, [(name, item.reason) for name, item in found])
        return GrammarRoute(spec, tuple(options), param)

    def _of_any_json(self, spec: GrammarSpec, able: Sequence[tuple[str, GrammarBackend]]) -> GrammarOption | None:
        """Return the last option, by the first backend that enforces it in full: there are few of those."""
        if spec not in self._any_json:
            found = (name for name, backend in able if backend.supports(spec).level is SupportLevel.FULL)
            if len(self._any_json) >= MAX_KEPT:
                self._any_json.clear()
            name = next(found, None)
            self._any_json[spec] = None if name is None else option_of(name, spec)
        return self._any_json[spec]

    def _no_backend(self, kind: Kind, param: str) -> RequestError:
        if not self.backends:
            text = f"{param} needs a grammar backend, and this server has none; start it with --grammar-backend auto"
            return RequestError(text, param=param, code="unsupported_parameter")
        kinds = ", ".join(f"{name}: {' '.join(sorted(b.kinds))}" for name, b in self.backends.items())
        text = f"{param} is a grammar of kind {kind}, which no backend here reads ({kinds})"
        return RequestError(text, param=param, code="unsupported_grammar")


@dataclass(frozen=True, slots=True)
class ToolReport:
    """What a reply says of the calls of one tool; as `GrammarReport`. `valid` is None where it was not called."""

    name: str
    enforcement: Enforcement
    ignored: tuple[str, ...]
    valid: bool | None


@dataclass(frozen=True, slots=True)
class GrammarReport:
    """What a reply says of its grammar.

    Attributes:
        backend: Its name.
        enforcement: `full`; `approximate`: but for `ignored`; `validate_only`: any JSON, judged at the end.
        ignored: JSON pointers or keywords.
        valid: Whether the text conforms; None where it was cut off or could not be judged in time.
        tools: The same for each tool that could be called.
    """

    backend: str
    enforcement: Enforcement
    ignored: tuple[str, ...]
    valid: bool | None
    tools: tuple[ToolReport, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        if not self.tools:
            del made["tools"]
        return made


def outer_types(source: str) -> tuple[str, ...]:
    """Return the types that a schema's instance may have, as far as the schema says so at its top."""
    root = schema.parse(source)
    given = root.get("type") if isinstance(root, dict) else None
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list):
        return tuple(given)
    if isinstance(root, dict) and any(key in root for key in ("properties", "required", "additionalProperties")):
        return ("object",)
    return schema.TYPES


def unenforceable(param: str, reasons: Sequence[tuple[str, str]]) -> RequestError:
    """Word the refusal of a grammar by why each backend cannot enforce it."""
    text = "; ".join(f"{name}: {why}" for name, why in reasons)
    return RequestError(f"{param} cannot be enforced: {text}", param=param, code="unsupported_grammar")


def not_strict(param: str, found: Sequence[SchemaOffer]) -> RequestError:
    """Word the refusal of a strict schema, by the backend that would come nearest."""
    best = min(found, key=lambda item: (bool(item.reason), len(item.ignored) + len(item.annotations)))
    places = [*best.ignored, *best.annotations]
    why = best.reason or "; ".join(f"{place} ({advice(place)})" for place in places[:8])
    instead = "change these keywords, drop strict, or serve without --strict-schema"
    text = f"{param} is strict and cannot be enforced in full: {why}; {instead}"
    return RequestError(text, param=param, code="unsupported_grammar")


def _option(name: str, item: SchemaOffer, spec: GrammarSpec, *, relax_schema: bool = False) -> EnforcementOption:
    enforcement: Enforcement = "approximate" if item.ignored else "full"
    made = option_of(name, spec, item.source, relax_schema=relax_schema)
    return EnforcementOption(made, enforcement, item.ignored or item.annotations, item.place, item.alone)


def _unasked(name: str, normal: Normal, spec: GrammarSpec, *, relax_schema: bool = False) -> EnforcementOption:
    """Return an option of a backend that the engine asks what it enforces; what is missing comes back as left out."""
    return EnforcementOption(option_of(name, spec, relax_schema=relax_schema, unasked=True), "full", (), normal.place)
