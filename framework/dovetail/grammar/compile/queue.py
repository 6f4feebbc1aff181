"""Grammars that wait for a thread: in turn between owners, first come within one."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

NICE = 5
T = TypeVar("T")


class FairQueue(Generic[T]):
    """Takes from each owner in turn. Thread-safe."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, deque[T]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._num_idle = 0

    @property
    def is_free(self) -> bool:
        """Whether somebody waits for an item that would come now."""
        with self._changed:
            return self._num_idle > sum(len(items) for items in self._by_owner.values())

    def __len__(self) -> int:
        with self._changed:
            return sum(len(items) for items in self._by_owner.values())

    def put(self, owner: str, item: T) -> None:
        """Add an item behind the owner's others."""
        with self._changed:
            self._by_owner.setdefault(owner, deque()).append(item)
            self._changed.notify()

    def get(self) -> T | None:
        """Wait for an item; None once the queue was closed."""
        with self._changed:
            self._num_idle += 1
            while not self._by_owner and not self._closed:
                self._changed.wait()
            self._num_idle -= 1
            if self._closed:
                return None
            owner, items = self._by_owner.popitem(last=False)
            item = items.popleft()
            if items:
                self._by_owner[owner] = items  # behind the other owners
            return item

    def close(self) -> None:
        """Drop what waits and wake whoever waits for it."""
        with self._changed:
            self._closed = True
            self._by_owner.clear()
            self._changed.notify_all()


class Workers:
    """Threads that run what is put to them, in turn between owners; they yield to the engine's."""

    def __init__(self, name: str, num: int) -> None:
        """Start `num` threads."""
        self.queue: FairQueue[Callable[[], None]] = FairQueue()
        for index in range(num):
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True).start()

    def put(self, owner: str, work: Callable[[], None]) -> None:
        """Have work done; it must not raise."""
        self.queue.put(owner, work)

    @property
    def is_free(self) -> bool:
        """Whether a thread would take work at once."""
        return self.queue.is_free

    def close(self) -> None:
        """End the threads; what one is working on goes on."""
        self.queue.close()

    def _run(self) -> None:
        be_nice()
        while (work := self.queue.get()) is not None:
            work()
            del work  # what it holds, such as a grammar, would stay until the next one comes


def be_nice() -> None:
    """Let the calling thread yield to the engine's; on Linux a thread has a niceness of its own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except OSError:
        logger.debug("cannot lower the priority of a compile thread")
