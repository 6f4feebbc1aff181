"""What the functions that a chat template calls may build, and how long they may take: checked before they run.

| table | of |
|---|---|
| `FILTERS` | Jinja's filters that build more than they are given, or take more than linear time |
| `METHODS` | methods of `str`, `bytes` and `int` of which the same is true |
| `ITERATING` | filters that iterate, most of them in Python: their input ticks |
| `TESTS` | tests that look through a value |

What is in no table takes time in proportion to its input, and builds a few times as much at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from dovetail.text.chat.budget import Bound, RenderBudget, TemplateLimitError

MAX_WIDTH = 1 << 16
MAX_JSON_WIDTH = 16
MAX_ATTRIBUTES = 16
_WIDE_FORMAT = re.compile(r"\d{6}")
_NUMBER = re.compile(r"\d+")
_GIVEN_WIDTH = {"%": re.compile(r"%[-+ #0-9.]*\*"), "{": re.compile(r"\{[^{}]*\{")}
"""Where a width or a precision stands among the values: `%-*d`, `{0:{1}}`."""
_CODECS = frozenset((
    "ascii", "iso-8859-1", "latin-1", "latin1", "us-ascii", "utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be",
    "utf-32-le", "utf-8", "utf-8-sig", "utf8",
))  # fmt: skip
"""Others take time with the square of a text, or load code; Python keeps the names of those that it does not know."""
_SHORT_ERRORS = frozenset(("ignore", "replace", "strict"))
_LONGEST_NAME = 90
"""Characters in place of one that a codec does not have, by `namereplace`."""

ITERATING = frozenset((
    "batch", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice",
    "sort", "sum", "unique",
))  # fmt: skip
TESTS = frozenset((
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower", "lt",
    "ne", "upper",
))  # fmt: skip


def check_widths(values: Iterable[Any], most: int = MAX_WIDTH) -> None:
    """Refuse a number that would pad a text to more than `most` characters, or by which `round` takes as long."""
    if any(isinstance(value, int) and abs(value) > most for value in values):
        raise TemplateLimitError(f"the chat template asks for a width above {most}")


def check_format(budget: RenderBudget, text: Any, values: Iterable[Any], mark: str) -> None:
    """Check `text % values`, or `text.format(values)`, with `mark` before each place."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if _WIDE_FORMAT.search(text) or _GIVEN_WIDTH[mark].search(text.replace(mark + mark, "")):
        raise TemplateLimitError("the chat template formats to too large a width, or to one that is a value")
    places = text.count(mark)
    if mark == "{":
        budget.count(places)  # each is formatted in Python
    widths = sum(map(int, _NUMBER.findall(text)))  # any number may be one
    budget.size(len(text) + widths + places * max(map(budget.weigh, values), default=0))


def _widths(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_widths((*args, *kwargs.values()))


def _superlinear(name: str) -> Bound:
    def bound(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_widths((*args, *kwargs.values()))
        budget.superlinear([value, *args, *kwargs.values()], name)

    return bound


def _format(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_format(budget, str(value), (*args, *kwargs.values()), "%")


def _indent(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_widths((*args, *kwargs.values()))
    width = kwargs.get("width", args[0] if args else 4)
    wide = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    lines = len(value.splitlines()) if isinstance(value, str) else 0
    budget.size(budget.weigh(value) + (lines + 2) * (wide + 1))


def _to_json(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = (*args, *kwargs.values())
    check_widths(given, MAX_JSON_WIDTH)
    texts = [text for each in given for text in (each if isinstance(each, (list, tuple)) else (each,))]
    if any(isinstance(text, str) and len(text) > MAX_JSON_WIDTH for text in texts):
        raise TemplateLimitError(f"the chat template asks for JSON with a separator of more than {MAX_JSON_WIDTH}")


def _replace(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = [*args, *kwargs.values()][:2]
    if len(given) == 2:
        text, old, new = (each if isinstance(each, (str, bytes)) else str(each) for each in (value, *given))
        if isinstance(text, bytes) != isinstance(old, bytes):
            return  # which is a TypeError
        budget.size(len(text) + text.count(old) * len(new))  # type: ignore[arg-type] # both are the same


def _join(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    budget.size(sum(budget.weigh(item) + len(value) for item in args[0]) if args else 0)


def _translate(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    table = args[0] if args else {}
    longest = max(map(budget.weigh, table.values()), default=1) if isinstance(table, dict) else 1
    budget.size(len(value) * longest)


def _expand_tabs(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    width = [*args, *kwargs.values(), 8][0]
    tabs = value.count("\t" if isinstance(value, str) else b"\t")
    budget.size(len(value) + tabs * (width if isinstance(width, int) else 0))


def _product(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for text in (*args, *kwargs.values()):
        if isinstance(text, (str, bytes)) and len(text) * budget.weigh(value) > budget.limits.searched:
            raise TemplateLimitError("the chat template searches or strips a long text by another long one")


def _codec(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name, errors = [*args, None, None][:2]
    name, errors = kwargs.get("encoding", name) or "utf-8", kwargs.get("errors", errors) or "strict"
    if str(name).lower().replace("_", "-") not in _CODECS:
        raise TemplateLimitError(f"the chat template names a codec other than {', '.join(sorted(_CODECS))}")
    budget.size(len(value) * (1 if errors in _SHORT_ERRORS else _LONGEST_NAME))


def _by_attributes(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for text in (*args, *kwargs.values()):  # sorting asks for all of them, of all items, at once
        if isinstance(text, str) and text.count(",") + text.count(".") >= MAX_ATTRIBUTES:
            raise TemplateLimitError(f"the chat template orders by more than {MAX_ATTRIBUTES} attributes")


FILTERS: dict[str, Bound] = {
    **dict.fromkeys(("batch", "center", "round", "slice", "truncate"), _widths),
    **{name: _superlinear(name) for name in ("pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")},
    **dict.fromkeys(("groupby", "sort"), _by_attributes),
    "format": _format,
    "indent": _indent,
    "replace": _replace,
    "tojson": _to_json,
    "trim": _product,
}
METHODS: dict[str, Bound] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _widths),
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"), _product),
    **dict.fromkeys(("decode", "encode"), _codec),
    **{name: _superlinear(name) for name in ("striptags", "unescape")},
    "expandtabs": _expand_tabs,
    "join": _join,
    "replace": _replace,
    "translate": _translate,
}
