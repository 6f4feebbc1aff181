"""Routes as the engine follows them, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarLimits, GrammarSpec, Vocabulary
from dovetail.grammar.compile.child import try_out
from dovetail.grammar.spec.normal import normalize
from dovetail.grammar.spec.relax import relax_schema
from dovetail.grammar.spec.route import EnforcementOption, GrammarRoute, asked
from dovetail.grammar.spec.wire import spec_of
from dovetail.messages import GrammarOption
from dovetail.plugins import Registry, load, make_plan
from dovetail_grammar.rewriting.form import form_of

NAMES = ("llguidance", "outlines", "xgrammar")


def resolved(
    way: EnforcementOption, backends: Mapping[str, GrammarBackend]
) -> tuple[GrammarOption, tuple[str, ...], Callable[[str], str]] | None:
    """Return a way's step as its backend enforces it, what it does not and its places; None where it is not taken."""
    return asked(backends[way.grammar.backend], way.grammar) if way.grammar.unasked else (way.grammar, (), str)


def backends_of(vocabulary: Vocabulary) -> dict[str, GrammarBackend]:
    """Make the built-in backends, or skip."""
    made: dict[str, GrammarBackend] = {}
    for name in NAMES:
        pytest.importorskip({"outlines": "outlines_core"}.get(name, name))
        plan = make_plan(Registry.scan(), grammar_backend=name)
        made[name] = load(plan, "compiler").get("grammar_backend", name)(vocabulary)
    return made


@dataclass(frozen=True)
class WrittenSchema:
    """A schema as the built-in backends compile it, and where its places stood in the given one."""

    schema: Any
    source: str
    dropped: tuple[str, ...]
    place: Callable[[str], str]


def written(given: Any, *, is_split: bool = False) -> WrittenSchema:
    """Return a schema in today's keywords, rewritten."""
    normal = normalize(given, is_split=is_split)
    form = form_of(normal.source)
    schema = form.schema if form.places else normal.schema
    return WrittenSchema(schema, form.source, normal.dropped, lambda pointer: normal.place(form.place(pointer)))


class Enforced:
    """The first way of a route that compiles."""

    def __init__(
        self,
        route: GrammarRoute,
        backends: Mapping[str, GrammarBackend],
        vocabulary: Vocabulary,
        *,
        full_only: bool = False,
    ) -> None:
        """Compile; `full_only`: a way that is not full is only named."""
        self.errors: list[str] = []
        self.enforcement = "refused"
        self.ignored: tuple[str, ...] = ()
        for way in route.options:
            if way.enforcement != "full" and full_only:
                self.enforcement, self.ignored = way.enforcement, way.ignored
                return  # nothing is claimed of it
            backend = backends[way.grammar.backend]
            found = resolved(way, backends)
            if found is None:
                continue
            step, lost, place = found

            def compiled(spec: GrammarSpec, backend: GrammarBackend = backend) -> CompiledGrammar:
                result = backend.compile(spec, GrammarLimits())
                made = backend.load(result) if isinstance(result, bytes) else result
                try_out(made, vocabulary)
                return made

            try:
                spec, until = spec_of(step), time.monotonic() + 60
                made, left_out = relax_schema(spec, compiled, until) if step.relax_schema else (compiled(spec), ())
                self.grammar = made
            except RequestError as error:
                self.errors.append(error.message)
                continue
            self.enforcement, self.ignored = way.with_left_out((*lost, *map(place, left_out)))
            return

    def accepts(self, text: str) -> bool:
        """Whether a text is complete and conforms."""
        matcher, ids = self.grammar.matcher(), list(text.encode())
        return matcher.accept(ids) == len(ids) and matcher.accepting
