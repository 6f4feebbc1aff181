"""Asking a backend what it enforces of a schema, and leading its places back to the schema as it was given.

The router asks the backend that likes schemas most. Where that one enforces all of it, the engine asks the others, if
ever their turn comes: their answers take longer than the first one's way to a first token may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Support, SupportLevel
from dovetail.grammar.spec.normal import Normal
from dovetail.grammar.spec.wire import spec_of
from dovetail.messages import GrammarOption
from dovetail.sdk.schemas import schema

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
