"""Who is next: owner by owner, and batch by batch within an owner, however large each is."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappush, heapreplace
from typing import Any

from dovetail_server.batches.lines import Leased


class OwnerQueue:
    """Lines that this process may run, taken in turn."""

    def __init__(self) -> None:
        """Begin empty."""
        self._owners: OrderedDict[str, OrderedDict[str, deque[Leased]]] = OrderedDict()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def extend(self, lines: Iterable[Leased]) -> None:
        """Add lines behind those of their batches."""
        for line in lines:
            self._owners.setdefault(line.owner, OrderedDict()).setdefault(line.batch_id, deque()).append(line)
            self._num += 1

    def popleft(self) -> Leased:
        """Take the next line: its owner and its batch go behind the others.

        Raises:
            KeyError: There is none.
        """
        owner, batches = self._owners.popitem(last=False)
        batch_id, lines = batches.popitem(last=False)
        line = lines.popleft()
        self._num -= 1
        if lines:
            batches[batch_id] = lines
        if batches:
            self._owners[owner] = batches
        return line

    def drop(self, batch_id: str) -> None:
        """Forget the lines of a batch."""
        for owner, batches in list(self._owners.items()):
            self._num -= len(batches.pop(batch_id, ()))
            if not batches:
                del self._owners[owner]

    def clear(self) -> list[Leased]:
        """Take everything."""
        found = [line for batches in self._owners.values() for lines in batches.values() for line in lines]
        self._owners.clear()
        self._num = 0
        return found

    def keys(self) -> set[tuple[str, int]]:
        """Return which lines are here."""
        return {line.key for batches in self._owners.values() for lines in batches.values() for line in lines}


def quotas(rows: Sequence[Mapping[str, Any]], held: Mapping[str, int], room: int, first: int) -> dict[str, int]:
    """Divide the lines that are to be leased among batches.

    Args:
        rows: Batches with lines that wait: `id` and `owner`.
        held: By batch, how many lines this process has already.
        room: How many more it wants.
        first: How many batches of which it has none get a line although there is no room: a small batch does not wait
            until those that are leased of a large one are through.

    Returns:
        By batch, how many to lease.
    """
    found: dict[str, int] = {}
    for row in rows:
        if first > 0 and not held.get(row["id"], 0):
            found[row["id"]] = 1
            first, room = first - 1, room - 1
    # One line each in turn, beginning with whose owner, and then which batch, has the fewest.
    order = {batch_id: turn for turn, batch_id in enumerate(row["id"] for row in rows)}
    by_owner: dict[str, list[tuple[int, int, str]]] = {}
    for row in rows:
        num = held.get(row["id"], 0) + found.get(row["id"], 0)
        heappush(by_owner.setdefault(row["owner"], []), (num, order[row["id"]], row["id"]))
    owners = [(sum(num for num, _, _ in own), own[0][1], owner) for owner, own in by_owner.items()]
    heapify(owners)
    for _ in range(room if owners else 0):
        load, turn, owner = owners[0]
        num, batch_turn, batch_id = by_owner[owner][0]
        found[batch_id] = found.get(batch_id, 0) + 1
        heapreplace(by_owner[owner], (num + 1, batch_turn, batch_id))
        heapreplace(owners, (load + 1, turn, owner))
    return found
