"""Whether a text conforms to a JSON Schema. Only for the child process: see `validate`."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any, NoReturn

from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker, ValidationError
from jsonschema.exceptions import FormatError
from jsonschema.validators import extend, validator_for
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing.exceptions import Unresolvable

from dovetail.grammar.spec.normal import plain
from dovetail.sdk.expressions.characters import DIGIT, SPACE, WORD, others, ranges
from dovetail.sdk.schemas import schema as schemas
from dovetail.sdk.schemas.formats import PATTERNS, TEXT_PATTERNS

_CONTENT = frozenset(("contentEncoding", "contentMediaType"))
_EXACT = frozenset(("duration", "json-pointer", "relative-json-pointer"))
"""Formats of which the expressions have all texts."""
_TIME = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:[zZ]|([+-])(\d\d):(\d\d))", re.ASCII)


class UnknownFormatError(Exception):
    """A text may be of its format, and nobody here can tell."""


def _is_time(text: str) -> bool:
    """Whether a text is a time by RFC 3339; leap seconds are the last of a day in UTC."""
    found = _TIME.fullmatch(text)
    if found is None:
        return False
    hour, minute, second, away_hour, away_minute = (int(found[n] or 0) for n in (1, 2, 3, 5, 6))
    in_utc = hour * 60 + minute + (away_hour * 60 + away_minute) * (1 if found[4] == "-" else -1)
    is_leap = second == 60 and in_utc % 1440 == 1439
    return max(hour, away_hour) < 24 and max(minute, away_minute) < 60 and (second < 60 or is_leap)


class FormatChecks(FormatChecker):  # type: ignore[misc]  # the library has no types
    """Judges texts by the expressions of formats, where these say yes; by the library, where it knows better.

    Its packages for the other formats are not needed for that, and say nothing where they are not installed.
    """

    def __init__(self, *, is_lenient: bool = False) -> None:
        """`is_lenient`: a text of which nobody can tell is of its format."""
        super().__init__()
        self._is_lenient = is_lenient
        self._expressions = {name: re.compile(text) for name, text in (PATTERNS | TEXT_PATTERNS).items()}

    def check(self, instance: object, format: str) -> None:
        """Raise `FormatError` where a text is not of a format, and `UnknownFormatError` where that is not known."""
        if not isinstance(instance, str) or format not in self._expressions:
            super().check(instance, format)
            return
        if format in ("time", "date-time"):
            day, _, time = instance.replace("t", "T", 1).partition("T") if format == "date-time" else ("", "", instance)
            is_right = _is_time(time) and (format == "time" or self._expressions["date"].fullmatch(day) is not None)
        else:
            is_right = self._expressions[format].fullmatch(instance) is not None
        if is_right:
            return
        super().check(instance, format)
        if format in (*_EXACT, "time", "date-time"):
            raise FormatError(f"{instance!r} is not a {format!r}")
        if not self._is_lenient and format not in _VALIDATED:
            raise UnknownFormatError(format)


_VALIDATED = frozenset(("date", "ipv4", "ipv6", "uuid"))
"""Formats of which the library knows all texts by itself."""
FORMATS, LENIENT = FormatChecks(), FormatChecks(is_lenient=True)


def conforms(schema: Any, text: str) -> bool | None:
    """Whether `text` is JSON that conforms to `schema`, of any draft, formats included. Fetches nothing.

    The schema is judged by twice: as it came, by the rules of its draft, and in the normal form, which knows the words
    of all drafts. None: it refers to a schema that is not at hand, or a text may be of its format or hold content as
    draft 7 asks for it, and nobody here can tell.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    given = _for_python(copy.deepcopy(schema))
    draft = validator_for(given, default=Draft202012Validator)
    normal = _for_python(plain(schema))
    found = {_holds(draft, given, value, is_strict=False), _holds(Draft202012Validator, normal, value)}
    if None in found and _turns(given):
        return None
    if draft is Draft7Validator and any(isinstance(n, dict) and n.keys() & _CONTENT for _, n in schemas.every(given)):
        found.add(None)
    return False if False in found else None if None in found else True


_TURNING = frozenset(("not", "if", "oneOf", "maxContains", "unevaluatedItems", "unevaluatedProperties"))
"""Keywords by which a text may be valid as a part of it is not."""


def _turns(schema: Any) -> bool:
    """Whether what nobody can tell of a part says nothing of the whole, even if the part is taken to be valid."""
    return any(isinstance(node, dict) and node.keys() & _TURNING for _, node in schemas.every(schema))


def _multiple_of(validator: Any, step: float, value: Any, schema: Any) -> Iterator[ValidationError]:
    """As JSON writes both, 0.3 is three times 0.1; as floating-point numbers they differ."""
    if not validator.is_type(value, "number"):
        return
    if not math.isfinite(value):  # a number that is too large to be read
        yield from Draft202012Validator.VALIDATORS["multipleOf"](validator, step, value, schema)
    elif Fraction(str(value)) % Fraction(str(step)):
        yield ValidationError(f"{value!r} is not a multiple of {step!r}")


@cache
def _exact(draft: Any) -> Any:
    """Return a draft's validator that counts in decimals."""
    return extend(draft, {"multipleOf": _multiple_of})


def _holds(draft: Any, schema: Any, value: Any, *, is_strict: bool = True) -> bool | None:
    """Ask a draft's validator. `is_strict` False: words of other drafts, which it cannot use, say nothing."""
    draft = _exact(draft)
    try:
        draft(schema, format_checker=FORMATS, registry=REGISTRY).validate(value)
    except ValidationError:
        return False
    except UnknownFormatError:
        rest = draft(schema, format_checker=LENIENT, registry=REGISTRY)
        return None if _turns(schema) or rest.is_valid(value) else False
    except Unresolvable:
        return None
    except (AttributeError, KeyError, TypeError, ValueError):
        if is_strict:
            raise
    return True


_TOKENS = re.compile(r"\\k<\w+>|\\.|\[\^?\]|\[\^?(?:\\.|[^\]\\])*\]|\(\?<(?![=!])|\$|\{,", re.DOTALL)
_IN_CLASS = re.compile(r"\\.|&&|~~|--|\|\||(?<!^)\[", re.DOTALL)
_SETS = {"\\d": DIGIT, "\\w": WORD, "\\s": SPACE}
_SETS |= {name.upper(): others(chars) for name, chars in _SETS.items()}
_OWN = {"$": r"\Z", "\\B": r"(?!\b)", "{,": r"\{,", "[]": "(?!)", "[^]": r"[\s\S]", "(?<": "(?P<"}
"""What Python writes otherwise: its `$` also stands before a line's end at the text's, its `\\B` in no empty text."""


def as_python(pattern: str) -> str:
    """Write an expression of ECMAScript as Python means the same: ends, classes of characters, edges of words, names.

    Raises:
        re.error: It is none.
    """
    made = _TOKENS.sub(_token, pattern)
    re.compile(made)  # alone: a bracket too many would end the group
    return f"(?a:{made})"


def _token(found: re.Match[str]) -> str:
    text = found[0]
    if text in _SETS:
        return f"[{ranges(_SETS[text])}]"
    if text in _OWN:
        return _OWN[text]
    if text.startswith("\\k<"):
        return f"(?P={text[3:-1]})"
    if text[0] != "[":
        return text
    return _IN_CLASS.sub(_in_class, text)


def _in_class(found: re.Match[str]) -> str:
    """Write a part of a class; what Python may come to read as an operation on sets is escaped."""
    text = found[0]
    if text in _SETS:
        return ranges(_SETS[text])
    return (
        text if text[0] == "\\" else f"\\{text[0]}{text[1:]}" if text == "--" else "".join(f"\\{char}" for char in text)
    )


def _for_python(root: Any) -> Any:
    """Rewrite the expressions of a schema, which is changed, for the library: it searches with Python's."""
    for _, node in schemas.every(root):
        if not isinstance(node, dict):
            continue
        if "pattern" in node:
            node["pattern"] = as_python(node["pattern"])
        given = node.pop("patternProperties", {})
        for pattern, part in given.items():
            made, own = node.setdefault("patternProperties", {}), as_python(pattern)
            made[own] = {"allOf": [made[own], part]} if own in made else part
    return root


def _refuse(name: str) -> NoReturn:
    """NaN and Infinity are no JSON."""
    raise ValueError(name)
