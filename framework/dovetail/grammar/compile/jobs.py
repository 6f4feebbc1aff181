"""Grammars under way: who claims one, how long it has, and how many may wait."""

from __future__ import annotations

import enum
import logging
import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dovetail.grammar.compile.cache import Enforced, RejectedGrammar
from dovetail.grammar.spec.refusals import FULL, OWNER_FULL
from dovetail.messages import GrammarOption

LAST_OPTION_SHARE = 0.2
"""Of a request's time, kept for the last option: any JSON takes milliseconds, but judging its text takes time."""
Options = tuple[GrammarOption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """How many distinct grammars may be waiting for their compilation, and how many bytes of their sources."""

    max_waiting: int = 1024
    max_waiting_bytes: int = 64 << 20
    max_of_owner: int = 256
    max_bytes_of_owner: int = 16 << 20


class CompileSite(enum.Enum):
    """Where a grammar is compiled: in a thread, in a process, or in one for what is done soon."""

    HERE = "here"
    OUTSIDE = "outside"
    SWIFT = "swift"


class CompileFuture:
    """A request's claim to a compiled grammar; filled once, from another thread.

    Attributes:
        outcome: What came of it; None for a claim to the vocabulary alone.
        is_ready: Whether it is filled.
        num_claims: Requests that wait for it.
    """

    __slots__ = ("is_ready", "num_claims", "outcome")

    def __init__(self, outcome: Enforced | RejectedGrammar | None = None) -> None:
        self.outcome = outcome
        self.is_ready = outcome is not None
        self.num_claims = 1

    def fill(self, outcome: Enforced | RejectedGrammar | None) -> None:
        """Fill it."""
        self.outcome = outcome
        self.is_ready = True


@dataclass(slots=True, kw_only=True)
class CompileJob:
    """A grammar under way to its future.

    Attributes:
        options: The options to enforce it.
        key: What stands for them.
        future: To be filled.
        owner: Who asked first.
        asked: When.
        deadline: When the future is filled at the latest; later where only a process can compile it, and the first one
            is not there yet.
        patience_s: What it has.
        began: When a compilation began; None while it waits for its first.
        index: The option that is tried next.
        refused: Why the first option that was tried failed.
        is_early: Asked for before the vocabulary was made: what that took is nobody else's grammar.
        has_waited: For the first process; the other options do not wait for it again.
        slow: Backends and sources that took too long: they may do without what costs most.
    """

    options: Options
    key: bytes
    future: CompileFuture
    owner: str
    asked: float
    deadline: float
    patience_s: float
    began: float | None = None
    index: int = 0
    refused: RejectedGrammar | None = None
    is_early: bool = False
    has_waited: bool = False
    slow: set[tuple[str, str]] = field(default_factory=set)

    @property
    def last_option_at(self) -> float:
        """When there is time for nothing but the last option."""
        return self.deadline - LAST_OPTION_SHARE * (self.deadline - self.asked)

    @property
    def num_bytes(self) -> int:
        """Size of the sources."""
        return sum(len(option.source) for option in self.options)


@dataclass(slots=True)
class WaitingCompile:
    """What waits, counted."""

    num: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, job: CompileJob, sign: int = 1) -> None:
        """Count a job, or with a negative sign take it out."""
        size = sign * job.num_bytes
        for owner in ("", f"of {job.owner}"):
            self.num[owner] += sign
            self.num_bytes[owner] += size
            if not self.num[owner]:
                del self.num[owner], self.num_bytes[owner]

    def refuse(self, job: CompileJob, bounds: QueueBounds) -> RejectedGrammar | None:
        """Say why a job may not wait beside what does, or None."""
        of, size = f"of {job.owner}", job.num_bytes
        text = "too many different grammars of {} are waiting to be compiled; try again later"
        if self.num[of] >= bounds.max_of_owner or self.num_bytes[of] + size > bounds.max_bytes_of_owner:
            return RejectedGrammar(text.format("yours"), OWNER_FULL)
        if self.num[""] >= bounds.max_waiting or self.num_bytes[""] + size > bounds.max_waiting_bytes:
            return RejectedGrammar(text.format("all clients"), FULL)
        return None


# Grammars that wait for a thread: in turn between owners, first come within one.

logger = logging.getLogger(__name__)

NICE = 5


class Workers:
    """Threads that run what is put to them, from each owner in turn; they yield to the engine's."""

    def __init__(self, name: str, num: int) -> None:
        """Start `num` threads."""
        self._by_owner: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._num_idle = 0
        for index in range(num):
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True).start()

    @property
    def is_free(self) -> bool:
        """Whether a thread would take work at once."""
        with self._changed:
            return self._num_idle > len(self)

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._by_owner.values()))

    def put(self, owner: str, work: Callable[[], None]) -> None:
        """Have work done, behind the owner's other; it must not raise."""
        with self._changed:
            self._by_owner.setdefault(owner, deque()).append(work)
            self._changed.notify()

    def take(self) -> Callable[[], None] | None:
        """Wait for work; None once these were closed."""
        with self._changed:
            self._num_idle += 1
            while not self._by_owner and not self._closed:
                self._changed.wait()
            self._num_idle -= 1
            if self._closed:
                return None
            owner, waiting = self._by_owner.popitem(last=False)
            work = waiting.popleft()
            if waiting:
                self._by_owner[owner] = waiting  # behind the other owners
            return work

    def close(self) -> None:
        """Drop what waits and end the threads; what one is working on goes on."""
        with self._changed:
            self._closed = True
            self._by_owner.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        be_nice()
        while (work := self.take()) is not None:
            work()
            del work  # what it holds, such as a grammar, would stay until the next one comes


def be_nice() -> None:
    """Let the calling thread yield to the engine's; on Linux a thread has a niceness of its own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except OSError:
        logger.debug("cannot lower the priority of a compile thread")
