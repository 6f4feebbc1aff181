"""Whether a text conforms to a JSON Schema. Only for the child process: see `validate`."""

from __future__ import annotations

import copy
import json
import re
from typing import Any, NoReturn

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing.exceptions import Unresolvable

from dovetail.grammar.spec import schema as schemas
from dovetail.grammar.spec.expressions.characters import DIGIT, SPACE, WORD, others, ranges
from dovetail.grammar.spec.normal import plain

FORMATS = Draft202012Validator.FORMAT_CHECKER


def verdict(schema: Any, text: str) -> bool | None:
    """Whether `text` is JSON that conforms to `schema`, of any draft, formats included. Fetches nothing.

    The schema is judged by twice: as it came, by the rules of its draft, and in the normal form, which knows the words
    of all drafts. None: it refers to a schema that is not at hand.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    given = _for_python(copy.deepcopy(schema))
    draft = validator_for(given, default=Draft202012Validator)
    normal = _for_python(plain(schema))
    found = {_holds(draft, given, value, is_strict=False), _holds(Draft202012Validator, normal, value)}
    return False if False in found else None if None in found else True


def _holds(draft: Any, schema: Any, value: Any, *, is_strict: bool = True) -> bool | None:
    """Ask a draft's validator. `is_strict` False: words of other drafts, which it cannot use, say nothing."""
    try:
        draft(schema, format_checker=FORMATS, registry=REGISTRY).validate(value)
    except ValidationError:
        return False
    except Unresolvable:
        return None
    except (AttributeError, KeyError, TypeError, ValueError):
        if is_strict:
            raise
    return True


_TOKENS = re.compile(r"\\k<\w+>|\\.|\[\^?\]|\[\^?(?:\\.|[^\]\\])*\]|\(\?<(?![=!])|\$", re.DOTALL)
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_SETS = {"\\d": DIGIT, "\\w": WORD, "\\s": SPACE}
_SETS |= {name.upper(): others(chars) for name, chars in _SETS.items()}
_OWN = {"$": r"\Z", "[]": "(?!)", "[^]": r"[\s\S]", "(?<": "(?P<"}
"""What Python writes otherwise: its `$` also stands before a line's end at the text's."""


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
    return _ESCAPE.sub(lambda part: ranges(_SETS[part[0]]) if part[0] in _SETS else part[0], text)


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
