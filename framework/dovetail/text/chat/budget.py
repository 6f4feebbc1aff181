"""What one render of a chat template may use, and how it is counted."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.runtime import Undefined
from jinja2.utils import Namespace

MAX_BITS = 4096
"""Of a number: squared again and again, one takes minutes in which nothing else runs."""
_CONTAINERS = (list, tuple, dict, set)
_FEW = 16


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template ran too long or built too much."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Bounds of one render.

    Attributes:
        seconds: Processor time of the thread.
        chars: Characters that are printed in all, and of any text or structure built on the way.
        items: Items of a container, and items that a filter iterates over.
        superlinear: Characters given to a function whose time grows faster than its input.
        searched: Product of both lengths in a search from the right, which CPython may do position by position.
        message_s: Seconds more for each message of the conversation.
    """

    seconds: float
    chars: int
    items: int
    superlinear: int
    searched: int
    message_s: float = 0.0


FULL = RenderLimits(seconds=5.0, chars=1 << 24, items=1 << 20, superlinear=1 << 14, searched=1 << 30)
"""Where a render may take its time: in `LLM`, and in a process that can be killed."""
INLINE = RenderLimits(
    seconds=0.015, chars=1 << 19, items=1 << 12, superlinear=1 << 10, searched=1 << 23, message_s=1e-4
)
"""In a server's process, for short conversations on its event loop. Published templates take 50 µs for a message.

Between two checks of the time one function runs, which takes 10 ms at most with such inputs.
"""
PROBE = RenderLimits(seconds=0.25, chars=1 << 20, items=1 << 14, superlinear=1 << 10, searched=1 << 24)
"""While a server starts: it renders short samples, to read the format off the template."""


class RenderBudget(threading.local):
    """What one render has used. Renders run each in one thread, so the state is the thread's."""

    def __init__(self) -> None:
        self.limits = FULL
        self._cpu = self._clock = math.inf
        self.restart()

    @contextmanager
    def bounded(self, limits: RenderLimits, num_messages: int = 0) -> Iterator[None]:
        """Keep what runs within to `limits`, and all renders of so many messages together to their seconds."""
        before = self.limits, self._cpu, self._clock
        self.limits = limits
        seconds = limits.seconds + num_messages * limits.message_s
        self._cpu, self._clock = time.thread_time() + seconds, time.perf_counter() + seconds
        try:
            yield
        finally:
            self.limits, self._cpu, self._clock = before
            self.restart()

    def restart(self) -> None:
        """Begin a render: nothing has been printed."""
        self._printed = 0
        self._weights: dict[int, tuple[Any, int]] = {}

    def tick(self, chars: int = 0) -> None:
        """Check the time, and count `chars` of text that is about to be printed."""
        if time.perf_counter() > self._clock:  # a tenth of the cost of asking for processor time, and never behind it
            left = self._cpu - time.thread_time()
            if left < 0:
                raise TemplateLimitError(f"the chat template ran longer than {self.limits.seconds:g} s")
            self._clock = time.perf_counter() + left
        self._printed += chars
        if self._printed > self.limits.chars:
            self.size(self._printed)

    def passed(self, value: Any) -> Any:
        """Check the time behind an expression, and return its value."""
        self.tick()
        return value

    def step(self) -> bool:
        """Check the time before a loop's condition."""
        self.tick()
        return True

    def each(self, values: Any) -> Any:
        """Return an iterator that checks the time and the size of what it yields; what cannot be iterated as it is."""
        if isinstance(values, Undefined):
            return values
        try:
            return self._each(iter(values))
        except TypeError:
            return values

    def _each(self, values: Iterator[Any]) -> Iterator[Any]:
        weight = 0
        for number in itertools.count(1):
            self.tick()
            try:
                value = next(values)
            except StopIteration:
                return
            weight += self.weigh(value)
            self.size(weight)
            self.count(number)
            yield value

    def written(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield pieces of one text, checking the time and its size."""
        size = 0
        for piece in pieces:
            self.tick()
            size += len(piece)
            self.size(size)
            yield piece

    def printed(self, value: Any) -> Any:
        """Count a value that is about to be printed, and return it."""
        self.tick(len(value) if type(value) is str else self.weigh(value))
        return value

    def size(self, chars: int) -> None:
        """Check the size of something about to be built."""
        if chars > self.limits.chars:
            raise TemplateLimitError(f"the chat template builds more than {self.limits.chars} characters")

    def count(self, items: int) -> None:
        """Check a number of items."""
        if items > self.limits.items:
            raise TemplateLimitError(f"the chat template goes through more than {self.limits.items} items")

    def superlinear(self, value: Any, name: str) -> None:
        """Check what a function is given whose time grows faster than that."""
        if (size := self.weigh(value)) > self.limits.superlinear:
            most = self.limits.superlinear
            raise TemplateLimitError(f"the chat template gives {name!r} {size} characters; at most {most} are allowed")

    def check(self, value: Any) -> Any:
        """Check something just built, and return it."""
        self.tick()
        if isinstance(value, (str, bytes)):
            if len(value) > self.limits.chars:
                self.size(len(value))
        elif isinstance(value, _CONTAINERS):
            if (weight := self.weigh(value)) > self.limits.chars:
                self.size(weight)
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise TemplateLimitError(f"the chat template computes with numbers of more than {MAX_BITS} bits")
        return value

    def weigh(self, value: Any) -> int:
        """Return about how many characters `value` prints, visiting each container once per render.

        Those that hold few texts and numbers, and nothing else, are visited again: to remember what a loop makes at
        each iteration takes much more memory than the text that it writes.
        """
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, Namespace):
            raise TemplateLimitError("a namespace inside a list or dict is not supported in chat templates")
        if not isinstance(value, _CONTAINERS):
            return 1
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        if len(value) > self.limits.items:
            self.count(len(value))
        items: Iterable[Any] = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        weight, nests = 2, False
        for item in items:  # most are texts: a call for each is what a render mostly consists of
            if isinstance(item, (str, bytes)):
                weight += 2 + len(item)
            else:
                nests = nests or isinstance(item, _CONTAINERS)
                weight += 2 + self._weigh_item(item)
        if nests or len(value) > _FEW:
            self._weights[id(value)] = (value, weight)  # the reference keeps the id from being reused
        return weight

    def _weigh_item(self, item: Any) -> int:
        if isinstance(item, OwnList):
            item.is_item = True
        return self.weigh(item)

    def grow(self, owner: OwnList, items: Iterable[Any]) -> None:
        """Check a list that is about to take more items."""
        self.tick()
        owner.weight += sum(2 + self._weigh_item(item) for item in items)
        self._weights.pop(id(owner), None)
        if owner.is_item:
            raise TemplateLimitError("the chat template changes a list that stands in another")
        self.size(owner.weight)
        self.count(len(owner))


class OwnList(list[Any]):
    """A list that the template wrote itself (`[]`): the only thing that a template may change.

    What others hold, such as the request's messages, cannot be changed. A list that stands in another cannot either:
    the weight of the other is known.
    """

    weight = 2
    is_item = False


Bound = Callable[[RenderBudget, Any, tuple[Any, ...], dict[str, Any]], None]
"""Checks what a function is about to build, or how long it may take: its value, arguments and keyword arguments."""
