"""Memory in use, and giving back what compilations left: the allocator keeps freed memory unless it is told."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

LARGE_BLOCK = 1 << 18
KEPT_BLOCKS = 32 << 20
"""glibc's largest bound of a block that it takes from its own heap."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
DELAYS_S = (2.0, 20.0)
"""After a compilation; the second time, and from then on, for what requests and the cache have let go of since."""


def resident_bytes() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    return _pages(1) * resource.getpagesize()


def address_space() -> int:
    """Bytes of address space in use; very many where the system does not say."""
    return _pages(0) * resource.getpagesize() or 1 << 36


class _Malloc(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _NAMES.split())


def allocated_bytes() -> int:
    """Bytes that libraries have allocated and not freed; 0 where the allocator does not say."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = _Malloc
    found = ask()
    return int(found.uordblks + found.hblkhd)


def most_own_bytes() -> int:
    """Return how much memory this process held at most, without what it shares, such as the code of libraries.

    Of a process that was just forked, that is what it has; shared pages count as they are now.
    """
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (most if sys.platform == "darwin" else most << 10) - _pages(2) * resource.getpagesize()


def count_most_anew() -> None:
    """Have `most_own_bytes` count from now on, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _pages(column: int) -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[column])
    except OSError:
        return 0


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


class Trimmer:
    """Returns freed memory to the system, some time after compilations. Thread-safe."""

    def __init__(self, let_go: Callable[[], bool]) -> None:
        """Begin with nothing to do.

        Args:
            let_go: Called before; lets go of memory, and says whether to come again.
        """
        self._let_go = let_go
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc only
        self._lock = threading.Lock()
        self._timers: dict[float, threading.Timer] = {}
        self._closed = False

    def soon(self) -> None:
        """A compilation has ended."""
        for delay in DELAYS_S:
            self._later(delay)

    def close(self) -> None:
        """Stop."""
        with self._lock:
            self._closed = True
            for timer in self._timers.values():
                timer.cancel()

    def _later(self, delay: float) -> None:
        with self._lock:
            if delay not in self._timers and not self._closed:
                timer = threading.Timer(delay, self._now, (delay,))
                timer.daemon = True
                self._timers[delay] = timer
                timer.start()

    def _now(self, delay: float) -> None:
        with self._lock:
            self._timers.pop(delay, None)
        if delay == DELAYS_S[-1] and self._let_go():
            self._later(delay)
        if self._trim is not None:
            self._trim(0)
