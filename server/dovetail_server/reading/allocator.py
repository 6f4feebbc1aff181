"""The C library's allocator, in processes that read bodies: what it keeps, and how much a process held at most."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from pathlib import Path

from dovetail.grammar.compile.memory import pages

LARGE_BLOCK = 1 << 18
KEPT_BLOCKS = 32 << 20
"""glibc's largest bound of a block that it takes from its own heap."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def most_own_bytes() -> int:
    """Return how much memory this process held at most, without what it shares, such as the code of libraries.

    Of a process that was just forked, that is what it has; shared pages count as they are now.
    """
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (most if sys.platform == "darwin" else most << 10) - pages(2) * resource.getpagesize()


def count_most_anew() -> None:
    """Have `most_own_bytes` count from now on, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def return_large_blocks() -> None:
    """Have every large block of memory go back to the system as soon as it is free, where the allocator can be told.

    glibc's own bound for these rises to 32 MiB with what is freed: a few large bodies are kept for ever then.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)


def keep_blocks() -> None:
    """Have the allocator keep up to `KEPT_BLOCKS` bytes that are free, and write to half as many once.

    Blocks within these cost no page faults. A page fault takes as long as copying what the page holds, and several
    times as long on virtual machines.
    """
    libc = ctypes.CDLL(None)
    if (mallopt := getattr(libc, "mallopt", None)) is None:
        return
    mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCKS)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BLOCKS)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    if block := libc.malloc(size := KEPT_BLOCKS // 2):
        ctypes.memset(block, 1, size)
        libc.free(block)
