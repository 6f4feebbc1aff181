"""`form_of`: a schema's text as the libraries get it, and where its keywords stood in that text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.sdk.schemas.origins import SchemaOrigin, origin_of
from dovetail.sdk.schemas.schema import LRUMemo, every, parse
from dovetail_grammar.rewriting.rewrite import KEYWORDS, Rewriter

MAX_GROWTH, MAX_ADDED = 4, 65536
"""A rewritten schema is kept within so many times its size, and so many characters more."""
_MAY_CHANGE = re.compile(f'"(?:{"|".join(sorted(KEYWORDS))})"')


@dataclass(frozen=True)
class SchemaForm:
    """A schema as the libraries get it.

    Attributes:
        source: Its text.
        schema: It, where it was rewritten.
        places: For schemas in it, by the identity of the object, where they stood; none where nothing was rewritten.
    """

    source: str
    schema: Any = None
    places: Mapping[int, SchemaOrigin] = field(default_factory=dict)

    def place(self, pointer: str) -> str:
        """Return where a keyword, named by its pointer, stood in the text that was given."""
        return origin_of(self.schema, self.places, pointer)


@LRUMemo
def form_of(source: str) -> SchemaForm:
    """Return the form of a schema in draft 2020-12's keywords; every backend asks for the same one.

    Raises:
        RequestError: It is no schema.
    """
    if _MAY_CHANGE.search(source) is None or not isinstance(parse(source), dict):
        return SchemaForm(source)
    root = json.loads(source)  # which nobody else has: it is rewritten in place
    places = {id(node): SchemaOrigin(pointer) for pointer, node in every(root) if isinstance(node, dict)}
    room = max(MAX_GROWTH * len(source), len(source) + MAX_ADDED)
    if not Rewriter(root, places, room).run():
        return SchemaForm(source)
    return SchemaForm(json.dumps(root, ensure_ascii=False), root, places)
