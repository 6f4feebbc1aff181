"""The page `reference/conformance.md`: every test of the conformance kit with its claim, from the code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import dovetail_testing as testing
from dovetail_testing.conformance.base import Conformance

HEAD = """\
# The conformance kit

Every test that a plugin of a kind has to pass, with its claim. [Testing plugins](../testing.md) says how to run them,
and what they are tried on.
"""


def page() -> str:
    """Return the whole page."""
    parts = [HEAD, *section("Every kind", Conformance)]
    shown = {Conformance}
    for name in testing.__all__:
        value = getattr(testing, name)
        if isinstance(value, type) and issubclass(value, Conformance):
            for cls in reversed(value.__mro__):
                if cls not in shown and issubclass(cls, Conformance):
                    shown.add(cls)
                    parts += section(f"`{cls.__name__}`", cls)
    return "\n".join(parts) + "\n"


def section(title: str, cls: type) -> Iterator[str]:
    """Yield the tests that a class itself has."""
    yield f"\n## {title}\n"
    yield f"{paragraph(cls)}\n"
    yield "| test | claim |"
    yield "|---|---|"
    for name, value in vars(cls).items():
        if name.startswith("test_"):
            yield f"| `{name}` | {paragraph(value).replace('|', chr(92) + '|')} |"


def paragraph(value: object) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
