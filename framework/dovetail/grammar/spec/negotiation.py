"""Asking a backend what it enforces of a schema, and leaving out what it says that it refuses.

The router asks the backend that likes schemas most. Where that one enforces all of it, the engine asks the others, if
ever their turn comes: their answers take longer than the first one's way to a first token may.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind, Support, SupportLevel
from dovetail.grammar.spec.normal import Normal
from dovetail.grammar.spec.wire import spec_of
from dovetail.messages import GrammarOption
from dovetail.sdk.schemas import schema

MAX_ROUNDS = 3
"""How often a schema from which something was left out is looked at again."""


@dataclass(frozen=True, slots=True)
class RelaxedSpec:
    """A schema as one backend enforces it.

    Attributes:
        schema: In the normal form, without what the backend refuses.
        ignored: Places in the given schema that are not enforced.
        annotations: Places that say nothing to a validator.
        normal: What it was made of.
        source: The schema's text.
        reason: Why the backend cannot enforce it at all; empty where it can.
        alone: Of what is enforced, places in the given schema that are not where the text may have another grammar.
    """

    schema: Any
    ignored: tuple[str, ...]
    annotations: tuple[str, ...]
    normal: Normal
    source: str
    reason: str = ""
    alone: tuple[str, ...] = ()


def relaxed(backend: GrammarBackend, normal: Normal, spec: GrammarSpec) -> RelaxedSpec:
    """Leave out of a schema what a backend says that it refuses.

    Args:
        backend: It.
        normal: The schema.
        spec: What else is asked for.
    """
    found, ignored, alone = normal.schema, list(normal.dropped), list[str]()
    support = Support.full()
    for _ in range(MAX_ROUNDS):
        if found is not normal.schema:
            spec = replace(spec, source=json.dumps(found, ensure_ascii=False))
        elif spec.source is not normal.source:
            spec = replace(spec, kind=Kind.JSON, source=normal.source)
        support = backend.supports(spec)
        if support.level is SupportLevel.NONE:
            return RelaxedSpec(found, tuple(ignored), (), normal, spec.source, support.reason)
        if support.level is SupportLevel.APPROXIMATE:
            ignored += map(normal.place, support.ignored)
        alone += map(normal.place, support.alone)
        if not support.refused:
            break
        # `places` knows schemas by identity: a copy's places are those of the normal form with the same pointers.
        found = schema.leave_out(found, support.refused)
    annotations = tuple(map(normal.place, support.ignored)) if support.level is SupportLevel.FULL else ()
    left_out, enforced = tuple(dict.fromkeys(ignored)), tuple(dict.fromkeys(alone))
    return RelaxedSpec(found, left_out, annotations, normal, spec.source, alone=enforced)


def asked(backend: GrammarBackend, option: GrammarOption) -> tuple[GrammarOption, tuple[str, ...]] | None:
    """Ask the backend of an option that nobody has asked yet.

    Returns:
        The option as the backend enforces it, and places of its source that are not enforced; None where the backend
        does not take it, or not in full where `relax_schema` does not allow less.
    """
    normal = Normal(schema.parse(option.source), (), {}, option.source)
    found = relaxed(backend, normal, spec_of(option))
    if found.reason or (found.ignored and not option.relax_schema):
        return None
    return msgspec.structs.replace(option, source=found.source, unasked=False), found.ignored
