"""What was made of the last few texts, so that who asks for the same one again gets the same object."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_KEPT, MAX_CHARS = 4, 64 * 1024
"""Texts that are kept, and their characters in all: what was made of a longer one goes as the next one comes."""


class LRUMemo(Generic[T]):
    """A function of one text that remembers. Thread-safe."""

    def __init__(self, make: Callable[[str], T]) -> None:
        """Keep nothing yet."""
        self._make = make
        self._lock = threading.Lock()
        self._made: OrderedDict[str, T] = OrderedDict()
        self.__doc__ = make.__doc__

    def __call__(self, source: str) -> T:
        """Return what the function makes of a text; shared, and not to be changed."""
        with self._lock:
            if source in self._made:
                self._made.move_to_end(source)
                return self._made[source]
        made = self._make(source)
        with self._lock:
            self._made[source] = made
            size = sum(map(len, self._made))
            while len(self._made) > 1 and (len(self._made) > MAX_KEPT or size > MAX_CHARS):
                size -= len(self._made.popitem(last=False)[0])
        return made

    def cache_clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._made.clear()
