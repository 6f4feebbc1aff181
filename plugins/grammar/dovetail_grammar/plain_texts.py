"""Schemas of strings that stand as they are, as expressions of Lark's terminals: `json_schema` in the style `text`.

```json
{"anyOf": [{"enum": ["red", "blue"]}, {"maxLength": 9, "not": {"pattern": "^[0-9]"}}]}
```

Terminals know what two expressions have in common (`&`), and what does not match one (`~`): nothing is multiplied out.
What does not match may be no text: `ALL` is any bytes. With any text in its place the library would have to find out,
character by character, that what all texts match leaves none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.sdk.schemas.formats import PATTERNS, TEXT_PATTERNS
from dovetail.sdk.schemas.keywords import ANNOTATIONS
from dovetail.sdk.schemas.schema import escape
from dovetail_grammar.expressions import plainly
from dovetail_grammar.patterns import strip_anchors

ANY = r"/(.|\n)*/"
ALL = r"ALL: ~/[^\s\S]/"
"""Belongs to a grammar with such an expression."""
_ENDS = re.compile(r"(?:^|[^\\])(?:\\\\)*\$$")
_SLASH = re.compile(r"\\.|/", re.DOTALL)


class PlainText:
    """One schema of strings.

    Attributes:
        lost: Places in the schema that are not said.
    """

    def __init__(self, schema: Any, excludes: Iterable[str] = ()) -> None:
        """Keep what there is; no string holds one of the texts `excludes`."""
        self.lost: list[str] = []
        self._schema, self._excludes = schema, excludes

    def expression(self) -> str:
        """Return the expression, without a name."""
        texts = "|".join(map(literal, self._excludes))
        held = [f"~(ALL {expression_of(texts)} ALL)"] if texts else []
        return _all([*(self._terms(self._schema, "") or [ANY]), *held])

    def _terms(self, schema: Any, where: str) -> list[str]:
        """Return expressions that all match."""
        if not isinstance(schema, Mapping):
            self.lost += [] if schema is True else [where]
            return []
        found = []
        for key, value in schema.items():
            place = f"{where}/{escape(key)}"
            if key == "pattern":
                made = plainly(value, in_one=True, without=()).parts
                found += [] if made is None else [_searched(made[0])]
                self.lost += [place] if made is None else []
            elif key == "format":
                known = TEXT_PATTERNS.get(value) or PATTERNS.get(value)
                found += [_searched(known)] if known else []
            elif key in ("enum", "const"):
                texts = [text for text in (value if key == "enum" else [value]) if isinstance(text, str)]
                found.append(expression_of("|".join(map(literal, texts)) if texts else "[^\\s\\S]"))
            elif key == "anyOf":
                found.append(_any(_all(self._terms(part, f"{place}/{at}")) for at, part in enumerate(value)))
            elif key == "allOf":
                found += [term for at, part in enumerate(value) for term in self._terms(part, f"{place}/{at}")]
            elif key == "not":
                found += self._without(value, place)
            elif key not in ("type", "minLength", "maxLength") and key not in ANNOTATIONS:
                self.lost.append(place)
        found += self._length(schema)
        return found if any(map(_is_text, found)) else [ANY, *found]

    @staticmethod
    def _length(schema: Mapping[str, Any]) -> list[str]:
        low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
        return [] if not low and high is None else [f"/(.|\\n){{{low},{'' if high is None else int(high)}}}/"]

    def _without(self, schema: Any, where: str) -> list[str]:
        """Return what matches a schema not, where all of it is said."""
        before = len(self.lost)
        terms = self._terms(schema, where)
        if len(self.lost) > before:
            self.lost[before:] = [where]
            return []
        return [f"~{_all(terms or [ANY])}"]


def lost_of(schema: Any) -> list[str]:
    """Return the places of a schema of strings that no expression says."""
    found = PlainText(schema)
    found.expression()
    return found.lost


def literal(text: str) -> str:
    """Write a text as an expression on one line."""
    named = {"\n": r"\n", "\r": r"\r"}
    return "".join(named.get(char) or re.escape(char) for char in text)


def expression_of(pattern: str) -> str:
    """Write an expression that a whole text matches as Lark has it."""
    return "/" + _SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], pattern) + "/"


def _searched(pattern: str) -> str:
    """Write an expression that is found somewhere, unless its anchors say where."""
    found = expression_of(f"(?:{strip_anchors(pattern)})")
    before = "" if pattern.startswith("^") else "ALL "
    behind = "" if _ENDS.search(pattern) else " ALL"
    return f"({before}{found}{behind})" if before or behind else found


def _is_text(term: str) -> bool:
    """Whether what matches is text."""
    return not term.startswith("~") and "ALL" not in term


def _all(terms: list[str]) -> str:
    return terms[0] if len(terms) == 1 else f"({' & '.join(terms)})"


def _any(terms: Iterable[str]) -> str:
    return f"({' | '.join(terms)})"
