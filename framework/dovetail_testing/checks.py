"""How a conformance test fails: with a sentence that names the fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

UNLOADED = "it cannot be loaded: "
"""How the message of the first test begins, where the others can say nothing else."""
COMPARED = "compared"
"""Property of a test's report: what it compared; `dovetail plugin check` and pytest's summary show it."""


def fail(message: str) -> NoReturn:
    """Fail the running test.

    Raises:
        AssertionError: Always; its message is what the plugin's author reads.
    """
    __tracebackhide__ = True
    raise AssertionError(message)


def check(is_right: bool, message: str) -> None:
    """Fail with `message` unless `is_right`."""
    __tracebackhide__ = True
    if not is_right:
        fail(message)


def shown(value: object, most: int = 160) -> str:
    """Return a value's `repr`, cut in the middle where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def raised(error: BaseException) -> str:
    """Return an exception as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


@contextmanager
def as_failure(kind: type[Exception], before: str = "", after: str = "") -> Iterator[None]:
    """Fail with an error's text, between two others, if the block raises one of `kind`."""
    __tracebackhide__ = True
    try:
        yield
    except kind as error:
        fail(f"{before}{raised(error) if kind is Exception else error}{after}")


@contextmanager
def no_error(what: str, where: str = "") -> Iterator[None]:
    """Fail if the block, which calls `what` of a stranger's, raises anything; the message says what it did."""
    __tracebackhide__ = True
    with as_failure(Exception, f"{what} raised ", where):
        yield
