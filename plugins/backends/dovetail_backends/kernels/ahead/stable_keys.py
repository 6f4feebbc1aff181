"""Makes Triton name a kernel by what it is, and not by which kernels were named before it.

The name under which a compiled kernel is kept covers the constants of the functions that it calls. Triton up to 3.6
reads those of a function before it has looked for them, unless the function was part of another kernel earlier: two
processes that meet kernels in different orders have two names for one of them, and compile it twice.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import jit


def make_keys_stable() -> None:
    """Have a function's own name worked out before a kernel that calls it reads its constants. May be called twice."""
    finder = getattr(jit, "DependenciesFinder", None)
    before = getattr(finder, "_update_hash", None)
    if finder is None or before is None or getattr(before, "is_stable", False):
        return

    def update_hash(self: Any, func: Any) -> None:
        _ = func.cache_key
        before(self, func)

    update_hash.is_stable = True  # type: ignore[attr-defined]
    finder._update_hash = update_hash
