"""Routes as the engine follows them, for tests."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dovetail.contracts.grammar import GrammarBackend, Vocabulary
from dovetail.grammar.spec.asking import asked
from dovetail.grammar.spec.route import EnforcementOption
from dovetail.messages import GrammarOption
from dovetail.plugins import Registry, load, make_plan

NAMES = ("llguidance", "outlines", "xgrammar")


def resolved(
    way: EnforcementOption, backends: Mapping[str, GrammarBackend]
) -> tuple[GrammarOption, tuple[str, ...]] | None:
    """Return a way's step as its backend enforces it, and what it does not; None where it does not take it."""
    return asked(backends[way.step.backend], way.step) if way.step.unasked else (way.step, ())


def backends_of(vocabulary: Vocabulary) -> dict[str, GrammarBackend]:
    """Make the built-in backends, or skip."""
    made: dict[str, GrammarBackend] = {}
    for name in NAMES:
        pytest.importorskip({"outlines": "outlines_core"}.get(name, name))
        plan = make_plan(Registry.scan(), grammar_backend=name)
        made[name] = load(plan, "compiler").get("grammar_backend", name)(vocabulary)
    return made
