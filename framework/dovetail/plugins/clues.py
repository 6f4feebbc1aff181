"""Clues: the texts in a chat template by which `auto` knows the models of a parser, without importing the parser."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PARSERS = frozenset(("reasoning_parser", "tool_parser"))
"""Kinds whose plugins may have clues."""
TEXTS = ("all", "any", "none")
_KNOWN = frozenset((*TEXTS, "regex", "behind", "score"))


class TemplateTexts(NamedTuple):
    """Texts that a template holds: all of the first, one of the second (if there are any), none of the third."""

    all: tuple[str, ...] = ()
    any: tuple[str, ...] = ()
    none: tuple[str, ...] = ()

    def fit(self, holds: Callable[[str], bool]) -> bool:
        """Whether a template, of which `holds` tells whether it holds a text, fits."""
        return (
            all(map(holds, self.all)) and (not self.any or any(map(holds, self.any))) and not any(map(holds, self.none))
        )


_NOTHING = TemplateTexts()


class Clue(NamedTuple):
    """One way to know a template.

    Attributes:
        score: How sure a template of this kind is, above 0 and up to 1.
        texts: Of the whole template.
        regex: A pattern that is found somewhere in it; None for any template.
        mark: A text; `behind` speaks of what stands behind the last one, or of everything where there is none.
        behind: Of what stands behind `mark`.
    """

    score: float
    texts: TemplateTexts = _NOTHING
    regex: re.Pattern[str] | None = None
    mark: str = ""
    behind: TemplateTexts = _NOTHING

    def fits(self, source: str, holds: Callable[[str], bool]) -> bool:
        """Whether a template fits; `holds` tells whether a text of it counts."""
        return (
            self.texts.fit(holds)
            and (self.regex is None or any(holds(found[0]) for found in self.regex.finditer(source)))
            and (not self.mark or self.behind.fit(source.rpartition(self.mark)[2].__contains__))
        )


def score_of(clues: Sequence[Clue], source: str, holds: Callable[[str], bool] | None = None) -> float:
    """Return the score of the first clue that fits a template, 0 if none does.

    Args:
        clues: Of one parser.
        source: The template's text.
        holds: Tells whether the template holds a text where that counts; all of its text counts if not given.
    """
    return next((clue.score for clue in clues if clue.fits(source, holds or source.__contains__)), 0.0)


def parse_clues(value: Any) -> tuple[Clue, ...]:
    """Check the clues of one parser, from a manifest.

    Raises:
        ValueError: They do not have the documented form; the message names the place.
    """
    if not isinstance(value, list | tuple):
        raise ValueError("clues: expected a list of objects")
    return tuple(_clue(each, f"clues[{number}]") for number, each in enumerate(value))


def _clue(value: Any, where: str) -> Clue:
    if not isinstance(value, dict) or not value.keys() <= _KNOWN:
        raise ValueError(f"{where}: expected an object of {', '.join(sorted(_KNOWN))}")
    score: Any = value.get("score")
    if type(score) not in (int, float) or not 0 < score <= 1:
        raise ValueError(f"{where}.score: expected a number above 0 and up to 1, got {score!r}")
    texts, regex, (mark, behind) = _texts(value, where), _pattern(value.get("regex"), where), _behind(value, where)
    if not (texts.all or texts.any or regex or mark):
        raise ValueError(f"{where}: fits every template; say in all, any, regex or behind what one holds")
    return Clue(float(score), texts, regex, mark, behind)


def _behind(value: Mapping[str, Any], where: str) -> tuple[str, TemplateTexts]:
    behind = value.get("behind")
    if behind is None:
        return "", _NOTHING
    if not isinstance(behind, dict) or not behind.keys() <= {*TEXTS, "text"}:
        raise ValueError(f"{where}.behind: expected an object of text, {', '.join(TEXTS)}")
    mark = behind.get("text")
    if not isinstance(mark, str) or not mark:
        raise ValueError(f"{where}.behind.text: expected a text, got {mark!r}")
    return mark, _texts(behind, f"{where}.behind")


def _texts(value: Mapping[str, Any], where: str) -> TemplateTexts:
    found = {}
    for key in value.keys() & TEXTS:
        texts = value[key]
        if not isinstance(texts, list | tuple) or set(map(type, texts)) - {str} or "" in texts:
            raise ValueError(f"{where}.{key}: expected a list of strings, none of them empty")
        found[key] = tuple(texts)
    return TemplateTexts(**found)


def _pattern(value: Any, where: str) -> re.Pattern[str] | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}.regex: expected a pattern, got {value!r}")
    try:
        return re.compile(value)
    except re.error as error:
        raise ValueError(f"{where}.regex: {value!r}: {error}") from None
