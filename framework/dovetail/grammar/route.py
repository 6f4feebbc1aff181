"""Which backend enforces a request's grammar, and how faithfully: the ladder, and the report of what came of it.

The steps of a request go to the engine in this order, and the first that compiles is enforced:

1. a backend that enforces the grammar in full, the one that likes its kind most first;
2. one that enforces it but for what it names, or may read `oneOf` as `anyOf`, or may leave out what it does not know:
   the one that ignores least first;
3. any JSON value of the schema's outermost types.

From the second on the finished text is validated, and the reply says so. Nothing is under-constrained without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind, Relax, Support, SupportLevel
from dovetail.engine.messages import GrammarStep
from dovetail.errors import RequestError
from dovetail.grammar import schema
from dovetail.grammar.wire import step_of

Enforcement = Literal["full", "approximate", "validate_only"]
_RELAXED = (frozenset((Relax.ONE_OF,)), frozenset((Relax.ONE_OF, Relax.UNSUPPORTED)))


@dataclass(frozen=True, slots=True)
class Way:
    """One step, and what it means for the reply."""

    step: GrammarStep
    enforcement: Enforcement
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """All ways to enforce a request's grammar, best first.

    Attributes:
        spec: The grammar as asked for.
        ways: In the order they are tried.
        param: The request's field.
    """

    spec: GrammarSpec
    ways: tuple[Way, ...]
    param: str

    @property
    def steps(self) -> tuple[GrammarStep, ...]:
        """What the engine gets."""
        return tuple(way.step for way in self.ways)

    def needs_validation(self, step: int) -> bool:
        """Whether the finished text of this step has to be judged."""
        return self.ways[step].enforcement != "full" and self.spec.kind is Kind.JSON


class Router:
    """Chooses ways among the backends of a process."""

    def __init__(self, backends: Mapping[str, GrammarBackend], *, strict_schema: bool = False) -> None:
        """Keep the backends, in the plan's order.

        Args:
            backends: By name.
            strict_schema: Refuse a `strict` schema that cannot be enforced in full.
        """
        self._backends = dict(backends)
        self._strict_schema = strict_schema

    def route(self, spec: GrammarSpec, param: str) -> Route:
        """Return the ways for a grammar that `check_spec` has passed.

        Raises:
            RequestError: No backend reads this kind, or strictness forbids what would remain.
        """
        able = [
            (name, backend)
            for name, backend in sorted(self._backends.items(), key=lambda item: -item[1].preference.get(spec.kind, 0))
            if spec.kind in backend.kinds
        ]
        if not able:
            raise self._no_backend(spec, param)
        answers = [(name, spec, backend.supports(spec)) for name, backend in able]
        ways = [_way(name, s, support) for name, s, support in answers if support.level is SupportLevel.FULL]
        reasons = [
            f"{name}: {_reason(support)}" for name, _, support in answers if support.level is not SupportLevel.FULL
        ]
        if spec.strict and self._strict_schema:
            if not ways:
                raise _not_strict(param, reasons)
            return Route(spec, tuple(ways), param)
        ways += self._approximate(spec, able, answers)
        if not ways:
            text = f"{param} cannot be enforced: {'; '.join(reasons)}"
            raise RequestError(text, param=param, code="unsupported_grammar")
        return Route(spec, tuple(ways), param)

    def _approximate(
        self,
        spec: GrammarSpec,
        able: Sequence[tuple[str, GrammarBackend]],
        answers: Sequence[tuple[str, GrammarSpec, Support]],
    ) -> list[Way]:
        """Ways that are not full, those that ignore least first; at the end any JSON of the right type."""
        found = list(answers)
        if spec.kind is Kind.JSON:
            weaker = [replace(spec, relax=relax) for relax in _RELAXED]
            found += [(name, each, backend.supports(each)) for each in weaker for name, backend in able]
        partial = [item for item in found if item[2].level is SupportLevel.APPROXIMATE]
        ways = [_way(*item) for item in sorted(partial, key=lambda item: len(item[2].ignored))]
        if spec.kind is Kind.JSON:
            any_json = replace(spec, source=json.dumps({"type": outer_types(spec.source)}))
            name = next((n for n, b in able if b.supports(any_json).level is SupportLevel.FULL), None)
            if name is not None:
                ways.append(Way(step_of(name, any_json), "validate_only", ("/",)))
        return ways

    def _no_backend(self, spec: GrammarSpec, param: str) -> RequestError:
        if not self._backends:
            text = f"{param} needs a grammar backend, and this server has none; start it with --grammar-backend auto"
            return RequestError(text, param=param, code="unsupported_parameter")
        kinds = ", ".join(f"{name}: {' '.join(sorted(b.kinds))}" for name, b in self._backends.items())
        text = f"{param} is a grammar of kind {spec.kind}, which no backend here reads ({kinds})"
        return RequestError(text, param=param, code="unsupported_grammar")


@dataclass(frozen=True, slots=True)
class GrammarReport:
    """What a reply says of its grammar.

    Attributes:
        backend: Its name.
        enforcement: `full`; `approximate`: but for `ignored`; `validate_only`: any JSON, judged at the end.
        ignored: JSON pointers or keywords.
        valid: Whether the text conforms; None where it was cut off or could not be judged in time.
    """

    backend: str
    enforcement: Enforcement
    ignored: tuple[str, ...]
    valid: bool | None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "backend": self.backend,
            "enforcement": self.enforcement,
            "ignored": list(self.ignored),
            "valid": self.valid,
        }


def report(route: Route, step: int, valid: bool | None) -> GrammarReport:
    """Return the report for the step that the engine enforced."""
    way = route.ways[step]
    return GrammarReport(way.step.backend, way.enforcement, way.ignored, valid)


def outer_types(source: str) -> list[str]:
    """Return the types that a schema's instance may have, as far as the schema says so at its top."""
    root = schema.parse(source)
    given = root.get("type") if isinstance(root, dict) else None
    if isinstance(given, str):
        return [given]
    if isinstance(given, list):
        return given
    if isinstance(root, dict) and any(key in root for key in ("properties", "required", "additionalProperties")):
        return ["object"]
    return list(schema.TYPES)


def _way(name: str, spec: GrammarSpec, support: Support) -> Way:
    full = support.level is SupportLevel.FULL
    return Way(step_of(name, spec), "full" if full else "approximate", support.ignored)


def _reason(support: Support) -> str:
    return support.reason or f"ignores {', '.join(support.ignored[:8])}"


def _not_strict(param: str, reasons: Sequence[str]) -> RequestError:
    text = f"{param} is strict and cannot be enforced in full: {'; '.join(reasons)}; drop these keywords or strict"
    return RequestError(text, param=param, code="unsupported_grammar")
