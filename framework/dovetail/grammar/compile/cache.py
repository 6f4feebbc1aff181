"""What has been compiled, bounded in bytes, and what could not be, bounded in number."""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

import msgspec

from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend
from dovetail.grammar.spec.refusals import TOO_COMPLEX
from dovetail.messages import GrammarOption


@dataclass(frozen=True, slots=True)
class Enforced:
    """A grammar in force: which of the request's options it is, compiled, by what, and what was left out of it."""

    option: int
    compiled: CompiledGrammar
    backend: GrammarBackend
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RejectedGrammar:
    """Why a request's grammar cannot be enforced; `code` as in `RequestError`, None where the server is at fault."""

    message: str
    code: str | None


LARGE_BYTES, IDLE_S = 4 << 20, 30.0
"""A grammar of that size is let go of once nobody has asked for it so long: hostile ones would fill the cache."""

MAX_WEIGHED, WEIGHED_AT_ONCE = 32, 4
"""Of the grammars asked for last so many are weighed again, as a grammar grows while texts follow it, and so many of
these in turn with each new one."""


def key_of(options: tuple[GrammarOption, ...]) -> bytes:
    """Return what stands for the options to enforce a grammar: sources may take megabytes, also of a refused one."""
    return hashlib.blake2b(msgspec.msgpack.encode(options), digest_size=16).digest()


@dataclass(slots=True)
class Kept:
    """A grammar in the cache: it, its size when it was weighed, when it was last asked for, of `time.monotonic`.

    `seen_bytes` is the memory that it was seen to take: more, perhaps, than it says itself.
    """

    enforced: Enforced
    seen_bytes: int
    used: float
    num_bytes: int = 0


class GrammarCache:
    """Least recently used first out. Not thread-safe: its owner locks."""

    def __init__(self, max_bytes: int, max_refused: int = 1024, retry_s: float = 60.0) -> None:
        """Bound it; after `retry_s` a grammar that took too long may be tried again: the machine was busy, perhaps."""
        self.num_bytes = 0
        self._turn = 0
        self._retry_s = retry_s
        self._max_bytes = max_bytes
        self._max_refused = max_refused
        self._found: OrderedDict[Hashable, Kept] = OrderedDict()
        self._refused: OrderedDict[Hashable, tuple[RejectedGrammar, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable) -> Enforced | RejectedGrammar | None:
        """Return what is known of `key`."""
        entry = self._found.get(key)
        if entry is not None:
            self._found.move_to_end(key)
            entry.used = time.monotonic()
            return entry.enforced
        refused, until = self._refused.get(key, (None, math.inf))
        if time.monotonic() > until:
            del self._refused[key]
            return None
        if refused is not None:
            self._refused.move_to_end(key)
        return refused

    def put(self, key: Hashable, outcome: Enforced | RejectedGrammar, seen_bytes: int) -> None:
        """Keep an outcome. One that is larger than the whole bound is not kept.

        Args:
            key: See `key_of`.
            outcome: It.
            seen_bytes: Memory that it was seen to take: more, perhaps, than it says itself.
        """
        if isinstance(outcome, RejectedGrammar):
            lasting = outcome.code != TOO_COMPLEX
            self._refused[key] = outcome, math.inf if lasting else time.monotonic() + self._retry_s
            while len(self._refused) > self._max_refused:
                self._refused.popitem(last=False)
            return
        kept = Kept(outcome, seen_bytes, time.monotonic())
        self._weigh(kept)
        if kept.num_bytes > self._max_bytes or key in self._found:
            self.num_bytes -= kept.num_bytes
            return
        self._found[key] = kept
        for other in islice(reversed(self._found.values()), self._turn, self._turn + WEIGHED_AT_ONCE):
            self._weigh(other)
        following = self._turn + WEIGHED_AT_ONCE
        self._turn = following if following < min(len(self._found), MAX_WEIGHED) else 0
        self._shrink()

    def _weigh(self, kept: Kept) -> None:
        size = max(kept.enforced.compiled.num_bytes, kept.seen_bytes)
        self.num_bytes += size - kept.num_bytes
        kept.num_bytes = size

    def _shrink(self) -> None:
        while self.num_bytes > self._max_bytes:
            _, gone = self._found.popitem(last=False)
            self.num_bytes -= gone.num_bytes

    def let_go(self) -> bool:
        """Let go of large grammars that nobody has asked for lately, and of what has grown beyond the bound.

        Returns:
            Whether there are other large ones.
        """
        for kept in self._found.values():
            self._weigh(kept)
        self._shrink()
        large = [(key, kept) for key, kept in self._found.items() if kept.num_bytes >= LARGE_BYTES]
        old = [(key, kept) for key, kept in large if kept.used < time.monotonic() - IDLE_S]
        for key, kept in old:
            del self._found[key]
            self.num_bytes -= kept.num_bytes
        return len(old) < len(large)
