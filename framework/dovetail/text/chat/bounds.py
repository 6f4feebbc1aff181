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
_WIDE_FORMAT = re.compile(r"\d{6}")

ITERATING = frozenset((
    "batch", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice",
    "sort", "sum", "unique",
))  # fmt: skip
TESTS = frozenset((
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower", "lt",
    "ne", "upper",
))  # fmt: skip


def check_widths(values: Iterable[Any], most: int = MAX_WIDTH) -> None:
    """Refuse a number that would pad a text to more than `most` characters."""
    if any(isinstance(value, int) and value > most for value in values):
        raise TemplateLimitError(f"the chat template asks for a width above {most}")


def check_format(budget: RenderBudget, text: Any, values: Iterable[Any], mark: str) -> None:
    """Check `text % values`, or `text.format(values)`, with `mark` before each place."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if _WIDE_FORMAT.search(text) or "%*" in text:
        raise TemplateLimitError("the chat template formats to too large a width")
    budget.size(len(text) + text.count(mark) * max(map(budget.weigh, values), default=0))


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


def _search_from_right(budget: RenderBudget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    text = kwargs.get("sep", args[0] if args else None)
    if isinstance(text, (str, bytes)) and len(text) * len(value) > budget.limits.searched:
        raise TemplateLimitError("the chat template searches a long text from the right for another long one")


FILTERS: dict[str, Bound] = {
    **dict.fromkeys(("batch", "center", "round", "slice", "truncate"), _widths),
    **{name: _superlinear(name) for name in ("pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")},
    "format": _format,
    "indent": _indent,
    "replace": _replace,
    "tojson": _to_json,
}
METHODS: dict[str, Bound] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _widths),
    **dict.fromkeys(("rfind", "rindex", "rpartition", "rsplit"), _search_from_right),
    **{name: _superlinear(name) for name in ("striptags", "unescape")},
    "expandtabs": _expand_tabs,
    "join": _join,
    "replace": _replace,
    "translate": _translate,
}
