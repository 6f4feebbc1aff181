"""Memory in use, and giving back what compilations left: the allocator keeps freed memory unless it is told."""

from __future__ import annotations

import ctypes
import resource
import threading
from collections.abc import Callable
from pathlib import Path

DELAYS_S = (2.0, 20.0)
"""After a compilation; the second time, and from then on, for what requests and the cache have let go of since."""


def resident_bytes() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    return pages(1) * resource.getpagesize()


def address_space() -> int:
    """Bytes of address space in use; very many where the system does not say."""
    return pages(0) * resource.getpagesize() or 1 << 36


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


def pages(column: int) -> int:
    """Pages of a column of `/proc/self/statm`: address space, resident, shared; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[column])
    except OSError:
        return 0


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
