"""Regular expressions as JSON Schema and users write them: what libraries cannot read, or read as something else."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from dovetail.contracts.errors import RequestError
from dovetail_grammar.expressions import RARE, plainly, unicode_dialect

_UNREADABLE = re.compile(r"\(\?[=!<]|\\[1-9bBk]")
_DOUBLED = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})(?:[*+]|\{\d+(?:,\d*)?\})")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_PARTS = re.compile(rf"{_CLASS.pattern}|\\[pPux]\{{[^{{}}]*\}}|\\.|\{{\d+(?:,\d*)?\}}|\{{", re.DOTALL)
_CONTROL_CLASS = re.compile(r"\\p\{?(?:C|Other)")
_CONTROL = re.compile(
    r"(?<!\\)(?:\\\\)*\\(?:0|f|v|c[A-Za-z]|(?:x|u00)(?:0[0-8bcefBCEF]|1[0-9a-fA-F]|7[fF]))|\[(?:\\(?:x|u00)7[fF])+\]",
    re.DOTALL,
)
_PROPERTY = re.compile(r"\\p\{?([LNZMPSC])[a-z]?\}?")
_ASCII = "".join(map(chr, range(128)))
_STRICT = frozenset(map(chr, range(0x20))) - set("\t\n\r")
_RARE = r"\x00-\x08\x0b\x0c\x0e-\x1f"
"""Control characters that nobody writes."""
_BOM = "\ufeff"
_SPACES = r" \t\r\n\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000" + _BOM
"""What ECMAScript calls white space, without what nobody writes."""
_DASH = re.compile(r"(\\[wdsWDS])-(?!\])")
_OPAQUE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""An escape, or a class."""
_TOKENS = re.compile(rf"{_OPAQUE.pattern}|[()|]", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_KNOWN = frozenset(map(chr, range(128))) - frozenset("aceghijklmoqyzACEFGHIJKLMNOQRTUVXYZ")
_ENDING = re.compile(r"((?:^|[^\\])(?:\\\\)*)\\[zZ]$")
_NAMED = re.compile(rf"{_OPAQUE.pattern}|\(\?<[A-Za-z_$][A-Za-z0-9_$]*>", re.DOTALL)
_IN_CLASS = re.compile(r"\\.|\[|&&|~~", re.DOTALL)
_ESCAPES = {"[": r"\[", "&&": r"\&\&", "~~": r"\~\~"}
_ODD = re.compile(r"\\[ACEFGHIJKLMNOQRTUVXYZaeghijlmoqyz]|\[\^?\]")
_ODD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\[ACEFGHIJKLMNOQRTUVXYZaeghijlmoqyz]")
_PARTS_OF = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)


def is_unreadable(pattern: str) -> bool:
    """Whether a pattern has look-around, back-references, word boundaries or repetitions of repetitions."""
    return _UNREADABLE.search(pattern) is not None or has_doubled(pattern)


def has_doubled(pattern: str) -> bool:
    """Whether a repetition is repeated, as in `a++`: possessive to some, `(?:a+)+` to others, none to ECMAScript."""
    return _DOUBLED.search(pattern) is not None and _DOUBLED.search(_OPAQUE.sub("x", pattern)) is not None


def readable(pattern: str) -> str:
    """Return a pattern with the names of groups left out, and brackets in classes escaped.

    To ECMAScript `[` and `&&` in a class are characters; to others classes within it, and what two have in common.
    """

    def one(found: re.Match[str]) -> str:
        body = found[0]
        if body.startswith("(?<"):
            return "(?:"
        if not body.startswith("["):
            return body
        start = 2 if body.startswith("[^") else 1
        return body[:start] + _IN_CLASS.sub(lambda part: _ESCAPES.get(part[0], part[0]), body[start:-1]) + "]"

    return _NAMED.sub(one, pattern) if "[" in pattern or "(?<" in pattern else pattern


class Rewritten(NamedTuple):
    """What a pattern says.

    Attributes:
        parts: Patterns that together say so, all of which a text must match.
        work: What finding them took.
    """

    parts: tuple[str, ...]
    work: int


def rewritten(pattern: str, *, in_one: bool = False) -> Rewritten:
    """Return a pattern as libraries read it: without look-around, edges of words, anchors within, leaky classes.

    Args:
        pattern: The pattern; comes back alone where nothing else is known to say it.
        in_one: By one pattern.
    """
    known = readable(pattern)
    is_plain = not (is_unreadable(known) or has_odd_anchors(known) or is_leaky(tightened(known)))
    if is_plain:
        return Rewritten((known,), 0)
    made = plainly(pattern, in_one=in_one, without=RARE)
    return Rewritten(made.parts or (known,), made.work)


def is_odd(pattern: str) -> bool:
    """Whether libraries read in a way of their own what ECMAScript does not know, or reads as something else.

    That is an escaped letter without a meaning, a class that begins with its end, and a range from or to `-`.
    """
    pattern = strip_anchors(pattern)
    if "\\" not in pattern and "[]" not in pattern and "[^]" not in pattern and "--" not in pattern:
        return False
    for found in _PARTS_OF.finditer(pattern):
        inner = _ESCAPED.sub("..", found[0]) if found[0][0] == "[" else ""
        if _ODD.match(found[0]) or "--" in inner or (inner and _ODD_ESCAPE.search(found[0])):
            return True
    return False


def has_control(pattern: str) -> bool:
    """Whether a pattern asks for a control character, outside of classes, that JSON can write as a number only."""
    return "\\" in pattern and _CONTROL.search(_CLASS.sub(_kept_class, pattern)) is not None


def _kept_class(found: re.Match[str]) -> str:
    """Keep a class of one such character alone; others hold what JSON writes in another way, too."""
    return found[0] if _CONTROL.fullmatch(found[0]) is not None else "."


@lru_cache(maxsize=256)
def is_leaky(pattern: str) -> bool:
    """Whether a class lets an escaped quote or backslash through that it excludes: as some controls are in it.

    Found by trying thousands of classes. May say so of a pattern that is fine.
    """
    if _CONTROL_CLASS.search(_OPAQUE.sub(lambda found: "" if found[0][0] == "[" else found[0], pattern)):
        return True
    return any(_is_leaky_class(part) for part in _OPAQUE.findall(pattern) if part[0] == "[")


def tightened(pattern: str) -> str:
    r"""Return a pattern without rare control characters in its classes, which would make these leaky.

    What ECMAScript calls white space is so here, too, and what it takes for a character is written as one. `\A` and
    `\Z` around the whole, which it does not know, are the ends that their authors mean.
    """
    pattern = "^" + pattern[2:] if pattern.startswith(r"\A") else pattern
    if pattern.endswith(r"\Z") and not pattern.endswith(r"\\Z"):
        pattern = pattern[:-2] + "$"

    def one(found: re.Match[str]) -> str:
        body = found[0]
        if body in (r"\S", r"[\S]"):
            return f"[^{_SPACES}{_RARE}]"
        if body == r"\s":
            return f"[{_SPACES}]"
        if body == "{":
            return r"\{"  # as itself, which only some read so
        if not body.startswith("["):
            return body
        body = _DASH.sub(r"\1\\-", body)
        spaces = _SPACES + (r"\x0b\x0c" if body.startswith("[^") else "")
        body = body if r"\S" in body else body.replace(r"\s", spaces)
        return f"{body[:-1]}{_RARE}]" if body.startswith("[^") and _is_leaky_class(body) else body

    return _PARTS.sub(one, pattern)


@lru_cache(maxsize=256)
def _is_leaky_class(body: str) -> bool:
    if not body.startswith("[^") and "\\" not in body and body.isascii() and body.isprintable():
        return False  # nor do ranges between such characters hold others
    if r"\S" in body and r"\s" not in body:
        return True  # with a byte order mark, which ECMAScript calls white space
    try:
        found = re.compile(_PROPERTY.sub(_without_property, body), re.ASCII)
    except (re.error, KeyError):
        return True
    members = set(found.findall(_ASCII))
    return bool(members & _STRICT) and not {'"', "\\"} <= members


def _without_property(found: re.Match[str]) -> str:
    """Characters of ASCII that have a property for certain, by its first letter."""
    return {"L": "A-Za-z", "N": "0-9", "Z": " ", "M": "", "P": "", "S": "", "C": r"\x00-\x1f\x7f"}[found[1]]


def has_inner_anchors(pattern: str) -> bool:
    """Whether `^` or `$` stand anywhere but around the whole: some libraries ignore those."""
    return re.search(r"[$^]", _OPAQUE.sub("", strip_anchors(pattern))) is not None


def has_odd_anchors(pattern: str) -> bool:
    """Whether `^` or `$` stand anywhere but around the whole, or around each of its alternatives."""
    return has_inner_anchors(pattern) and not all(
        option.startswith("^") and option.endswith("$") and not has_inner_anchors(option) for option in options(pattern)
    )


def whole(pattern: str) -> str:
    """Return an expression that a whole text matches, without look-around, edges of words and anchors where known.

    Raises:
        RequestError: It repeats a repetition.
    """
    if not (is_unreadable(pattern) or has_odd_anchors(pattern)):
        return pattern
    if has_doubled(pattern):
        text = f"the regex {pattern[:80]!r} repeats a repetition (`a++`, `a+{{2}}`), which has no single meaning"
        raise RequestError(f"{text}; write a group around what is repeated: `(?:a+)+`", code="unsupported_grammar")
    made = plainly(f"^(?:{pattern})$", in_one=True, without=(), dialect=unicode_dialect())
    return made.parts[0] if made.parts else pattern


def has_unknown_escapes(pattern: str) -> bool:
    """Whether a letter is escaped that means nothing, or only to some: others take the letter itself."""
    return any(found[1] not in _KNOWN for found in _ESCAPED.finditer(strip_anchors(pattern)))


def options(pattern: str) -> list[str]:
    """Return a pattern's alternatives."""
    found, start, depth = [], 0, 0
    for token in _TOKENS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0 and token[0] == "|":
            found.append(pattern[start : token.start()])
            start = token.end()
    return [*found, pattern[start:]]


def strip_anchors(pattern: str) -> str:
    r"""Drop `^`, `$`, `\A` and `\Z` around a pattern: a grammar's regex is matched against the whole text anyway."""
    pattern = pattern.removeprefix("^").removeprefix(r"\A")
    pattern = _ENDING.sub(r"\1", pattern)
    if pattern.endswith("$") and not re.search(r"(?:^|[^\\])(?:\\\\)*\\\$$", pattern):
        pattern = pattern[:-1]
    return pattern
