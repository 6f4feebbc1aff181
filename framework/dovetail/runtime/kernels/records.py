"""Where figures of kernels are kept, and what they say; without torch, for who only shows them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dovetail.contracts.compiler import AheadCompiler

PREFIX = "kernels-"
"""Of names of files of kernel sets' figures."""


def records(compiler: type[AheadCompiler] | None) -> Path:
    """Return where to note what was measured of kernels: beside those that a compiler keeps, or with users' caches."""
    if compiler is None:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dovetail"
    return compiler.folder() / "dovetail"


def shown(rows: Sequence[int], times: Mapping[str, Sequence[float]]) -> str:
    """Return seconds of calls by set and number of rows: `us: 1 rows triton 8.1, acme 7.0; 16 rows …`."""
    each = (
        f"{num} rows {', '.join(f'{name} {seconds[at] * 1e6:.1f}' for name, seconds in times.items())}"
        for at, num in enumerate(rows)
    )
    return f"us: {'; '.join(each)}"
