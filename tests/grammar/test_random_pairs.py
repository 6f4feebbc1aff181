"""Random schemas and instances: what is called full accepts nothing invalid, in any spelling, alone or in a tool call.

`DOVETAIL_RANDOM_PAIRS=100000 pytest tests/grammar/test_random_pairs.py` is the whole run; other pairs with
`DOVETAIL_RANDOM_SEED=2`.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from typing import Any

import pytest
from grammar_routes import backends_of, resolved
from random_pairs import Maker, is_valid

from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.errors import RequestError
from dovetail.grammar.compile.trial import try_out
from dovetail.grammar.spec.route import Route, Router
from dovetail.grammar.spec.unique.matcher import UniqueGrammar
from dovetail.grammar.spec.unique.tokens import TokenTexts
from dovetail.grammar.spec.weaken import weaken
from dovetail.grammar.spec.wire import spec_of
from dovetail.grammar.structured_outputs import StructuredOutputs
from dovetail.plugins import Registry, load, make_plan
from dovetail.testing.conformance.grammar_samples import small_vocabulary

NUM = int(os.environ.get("DOVETAIL_RANDOM_PAIRS", "1200"))
SEED = int(os.environ.get("DOVETAIL_RANDOM_SEED", "0"))
MANY = 10_000
PER_SCHEMA = 10
BEGIN, END = '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Every byte is a token."""
    return small_vocabulary()


@pytest.fixture(scope="module")
def backends(vocabulary: Vocabulary) -> dict[str, GrammarBackend]:
    return backends_of(vocabulary)


class Enforced:
    """The first way of a route that compiles."""

    def __init__(self, route: Route, backends: dict[str, GrammarBackend], vocabulary: Vocabulary) -> None:
        self.errors: list[str] = []
        self.enforcement = "refused"
        for way in route.ways:
            if way.enforcement != "full" and NUM > MANY:
                self.enforcement, self.ignored = way.enforcement, way.ignored
                return  # nothing is claimed of it
            backend = backends[way.step.backend]
            found = resolved(way, backends)
            if found is None:
                continue
            step, lost = found

            def compiled(spec: GrammarSpec, backend: GrammarBackend = backend) -> CompiledGrammar:
                result = backend.compile(spec, GrammarLimits())
                made = backend.load(result) if isinstance(result, bytes) else result
                try_out(made, vocabulary)
                return made

            def watched(made: CompiledGrammar, unique: str = step.unique) -> CompiledGrammar:
                return UniqueGrammar(made, json.loads(unique), TokenTexts(vocabulary)) if unique else made

            try:
                spec, until = spec_of(step), time.monotonic() + 60
                made, left_out = weaken(spec, compiled, until) if step.weaken else (compiled(spec), ())
                self.grammar = watched(made)
            except RequestError as error:
                self.errors.append(error.message)
                continue
            self.enforcement, self.ignored = way.with_left_out((*lost, *left_out))
            return

    def accepts(self, text: str) -> bool:
        """Whether a text is complete and conforms."""
        matcher, ids = self.grammar.matcher(), list(text.encode())
        return matcher.accept(ids) == len(ids) and matcher.accepting


def enforced_alone(given: Any, backends: dict[str, GrammarBackend], vocabulary: Vocabulary) -> Enforced:
    spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(given, ensure_ascii=False))
    return Enforced(Router(backends).route(spec, "json_schema"), backends, vocabulary)


def enforced_in_a_call(given: Any, backends: dict[str, GrammarBackend], vocabulary: Vocabulary) -> Enforced:
    parser = load(make_plan(Registry.scan(), tool_parser="hermes"), "api").get("tool_parser", "hermes")()
    tools = [{"type": "function", "function": {"name": "f", "parameters": given}}]
    front = StructuredOutputs(backends)
    try:
        route = front.tools(parser, "hermes", tools, "required", parallel=False, param="tools")
    finally:
        front.close()
    return Enforced(route, backends, vocabulary)


@pytest.mark.parametrize("in_a_call", [False, True], ids=["alone", "in a tool call"])
def test_full_accepts_nothing_invalid(
    backends: dict[str, GrammarBackend], vocabulary: Vocabulary, in_a_call: bool
) -> None:
    """By the validators of the schemas' own drafts; most valid texts in the schema's order are accepted."""
    levels: Counter[str] = Counter()
    num_full = num_valid = num_rejected = 0
    for seed in range(NUM // PER_SCHEMA // 2):
        maker = Maker(seed + (1 << 20) * (1 + in_a_call) + (SEED << 22))
        given = maker.schema()
        if in_a_call:
            given = {
                "$schema": given["$schema"],
                "definitions": given["definitions"],
                "allOf": [{**given, "type": "object"}],
            }
            given["allOf"][0].pop("definitions")
        enforce = enforced_in_a_call if in_a_call else enforced_alone
        found = enforce(given, backends, vocabulary)
        levels[found.enforcement] += 1
        if found.enforcement != "full":
            if found.enforcement == "approximate":
                assert found.ignored
            continue
        for _ in range(PER_SCHEMA):
            value = maker.instance(given)
            text, expected = maker.text(value), is_valid({**given, "type": "object"} if in_a_call else given, value)
            accepted = found.accepts(BEGIN + text + END if in_a_call else text)
            assert expected or not accepted, (given, text)
            num_full += 1
            num_valid += expected
            num_rejected += expected and not accepted
    print(dict(levels), f"{num_full} pairs in full; {num_rejected} of {num_valid} valid texts rejected")
    assert levels["full"] > 0.3 * levels.total()
    assert num_rejected < 0.5 * num_valid
