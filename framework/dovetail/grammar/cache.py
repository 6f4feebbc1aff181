"""What has been compiled, bounded in bytes, and what could not be, bounded in number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend


@dataclass(frozen=True, slots=True)
class Enforced:
    """A grammar in force: which of the request's steps it is, compiled, and by what."""

    step: int
    compiled: CompiledGrammar
    backend: GrammarBackend


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request's grammar cannot be enforced; `code` as in `RequestError`, None where the server is at fault."""

    message: str
    code: str | None


class GrammarCache:
    """Least recently used first out. Not thread-safe: its owner locks."""

    def __init__(self, max_bytes: int, max_refused: int = 1024) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_refused = max_refused
        self._found: OrderedDict[Hashable, tuple[Enforced, int]] = OrderedDict()
        self._refused: OrderedDict[Hashable, Refused] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable) -> Enforced | Refused | None:
        """Return what is known of `key`."""
        entry = self._found.get(key)
        if entry is not None:
            self._found.move_to_end(key)
            return entry[0]
        refused = self._refused.get(key)
        if refused is not None:
            self._refused.move_to_end(key)
        return refused

    def put(self, key: Hashable, outcome: Enforced | Refused, key_bytes: int) -> None:
        """Keep an outcome. One that is larger than the whole bound is not kept."""
        if isinstance(outcome, Refused):
            self._refused[key] = outcome
            while len(self._refused) > self._max_refused:
                self._refused.popitem(last=False)
            return
        size = outcome.compiled.num_bytes + key_bytes
        if size > self._max_bytes or key in self._found:
            return
        self._found[key] = (outcome, size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, (_, gone) = self._found.popitem(last=False)
            self.num_bytes -= gone
