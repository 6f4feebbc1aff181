"""Panics of native code: PyO3 raises them as a `BaseException`, so that no `except Exception` sees them."""

from __future__ import annotations

_MODULE = "pyo3_runtime"
"""Each extension has a class of its own there, and none can be imported."""


def is_panic(error: BaseException) -> bool:
    """Whether an extension written in Rust panicked; the interpreter is as it was."""
    return type(error).__module__ == _MODULE
