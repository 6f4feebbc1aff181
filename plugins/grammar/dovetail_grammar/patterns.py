"""Regular expressions as JSON Schema and users write them: what libraries cannot read, or read as something else."""

from __future__ import annotations

import re

_UNREADABLE = re.compile(r"\(\?[=!<]|\\[1-9bBk]")
_NEGATED = re.compile(r"\[\^((?:\\.|[^\]\\])*)\]")
_HARMLESS = re.compile(r"[A-Za-z0-9]-[A-Za-z0-9]|\\[sSwWdDnrtfv./\]\[^*+?(){}|$-]|-$|^-")
_CONTROLS = re.compile(r"\\x[01][0-9a-fA-F]?|\\u00[01][0-9a-fA-F]?|\\c|\\0|[\x00-\x1f]")
_OPAQUE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""An escape, or a class."""


def is_unreadable(pattern: str) -> bool:
    """Whether a pattern has look-around, back-references or word boundaries."""
    return _UNREADABLE.search(pattern) is not None


def is_leaky(pattern: str) -> bool:
    """Whether a class may let an escaped quote or backslash through that it excludes.

    Such a class holds a control character, by being written so or by negation. May say so of a pattern that is fine.
    """
    if _CONTROLS.search(_NEGATED.sub("", pattern)):
        return True
    return any(set(_CONTROLS.sub("", _HARMLESS.sub("", body))) & set('"\\-') for body in _NEGATED.findall(pattern))


def has_inner_anchors(pattern: str) -> bool:
    """Whether `^` or `$` stand anywhere but around the whole: some libraries ignore those."""
    return re.search(r"[$^]", _OPAQUE.sub("", strip_anchors(pattern))) is not None


def strip_anchors(pattern: str) -> str:
    """Drop `^` and `$` around a pattern: a grammar's regex is matched against the whole text anyway."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and not re.search(r"(?:^|[^\\])(?:\\\\)*\\\$$", pattern):
        pattern = pattern[:-1]
    return pattern
