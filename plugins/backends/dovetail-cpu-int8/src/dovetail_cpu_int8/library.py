"""The compiled library, and which instructions of the processor it has code for."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

NAMES = {"AVX-512 VNNI": "avx512", "AVX2": "avx2", "plain C": "plain"}
"""How users call the library's paths."""


class Matrix(ctypes.Structure):
    """`struct matrix` of `c/rows.h`."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("num_out", c_int64),
        ("num_in", c_int64),
    )


@dataclass(frozen=True)
class Paths:
    """What the library has for this processor.

    Attributes:
        found: Names of paths, the fastest first.
        run: `dovetail_rows_run`.
        why: Why there are none, in a line.
    """

    found: tuple[str, ...] = ()
    run: Callable[..., int] | None = None
    why: str = ""

    def why_not(self, asked: str) -> str:
        """Return in a line why a path cannot be taken, "" if it can; `auto` does not take plain C."""
        names = [NAMES[name] for name in self.found]
        if self.why or asked in names or (asked == "auto" and names[:1] != ["plain"]):
            return self.why
        if asked == "auto":
            return (
                f"this processor ({platform.machine()}) has neither AVX-512 VNNI nor AVX2; "
                "--cpu-int8.path plain has it compute without"
            )
        return f"this processor does not have {asked}; possible: {', '.join(names)}"

    def number(self, asked: str) -> int:
        """Return the library's number of a path."""
        return 0 if asked == "auto" else [NAMES[name] for name in self.found].index(asked)


@lru_cache(maxsize=1)
def paths() -> Paths:
    """Load the library."""
    folder = Path(__file__).parent
    file = next(iter(sorted(folder.glob("_rows*.so"))), None)
    if file is None:
        return Paths(why=f"its library was not compiled into {folder}: install the package with a C compiler")
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        return Paths(why=f"its library cannot be loaded: {' '.join(str(error).split())}")
    name, run = library.dovetail_rows_path, library.dovetail_rows_run
    name.argtypes, name.restype = (c_int32,), c_char_p
    run.argtypes = (
        *(c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_float, c_void_p, c_void_p, c_int64),
        *(c_void_p, c_int32, c_void_p, c_int32, c_int32),
    )
    run.restype = c_int32
    names: list[str] = []
    while (found := name(len(names))) is not None:
        names.append(found.decode())
    return Paths(tuple(names), run)


@lru_cache(maxsize=1)
def parallel() -> int | None:
    """Return the address of `GOMP_parallel` of the OpenMP runtime that torch has loaded; None: one thread computes.

    So the threads are torch's own: there is no second pool, and they wait as `OMP_WAIT_POLICY` says.
    """
    try:
        start: Any = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):
        return None
    return ctypes.cast(start, c_void_p).value
