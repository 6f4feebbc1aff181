"""`SharedSpace`: which entry goes first, by the rule written out, and how much work that is."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection

import pytest

from dovetail.cache import by_owner
from dovetail.cache.by_owner import SharedSpace


class WrittenOut:
    """The same with all owners sorted for each question."""

    def __init__(self) -> None:
        self.entries: dict[str, OrderedDict[int, int]] = {}

    def add(self, key: int, owner: str, size: int) -> None:
        self.entries.setdefault(owner, OrderedDict())[key] = size

    def owner(self, key: int) -> str:
        return next(owner for owner, entries in self.entries.items() if key in entries)

    def use(self, key: int) -> None:
        self.entries[self.owner(key)].move_to_end(key)

    def remove(self, key: int) -> None:
        owner = self.owner(key)
        del self.entries[owner][key]
        if not self.entries[owner]:
            del self.entries[owner]

    def victim(self, owner: str, size: int, busy: Collection[int]) -> int | None:
        sizes = {name: sum(entries.values()) for name, entries in self.entries.items()}
        sizes[owner] = sizes.get(owner, 0) + size
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            found = next((key for key in self.entries.get(name, ()) if key not in busy), None)
            if found is not None:
                return found
        return None


@pytest.mark.parametrize("num_owners", [1, 3, 40])
def test_the_victim_is_that_of_the_rule_written_out(num_owners: int) -> None:
    """Also where owners have as much, come back, or keep all that they have; a question changes nothing."""
    for seed in range(8):
        draw = random.Random(seed)
        space, plain, keys = SharedSpace[int](), WrittenOut(), list[int]()
        for key in range(400):
            owner = f"o{draw.randrange(num_owners)}"
            busy = set(draw.sample(keys, draw.randrange(min(len(keys), 6) + 1)))
            size = draw.randrange(4)
            found = space.victim(owner, size, busy)
            assert found == plain.victim(owner, size, busy)
            assert found == space.victim(owner, size, busy)
            if keys and draw.random() < 0.4:
                used = draw.choice(keys)
                space.use(used)
                plain.use(used)
            for gone in {found, draw.choice(keys) if keys else None} - {None}:
                if draw.random() < 0.6:
                    space.remove(gone)
                    plain.remove(gone)
                    keys.remove(gone)
            space.add(key, owner, size)
            plain.add(key, owner, size)
            keys.append(key)
            assert space.total == sum(map(space.size, keys))
        assert len(space) == len(keys)


def test_many_owners_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10,000 owners a few are looked at for each eviction, and places that are left behind do not pile up."""
    space = SharedSpace[int]()
    for key in range(10_000):
        space.add(key, f"o{key}", 1 + key % 7)
    seen = [0]

    def counted(heap: list[tuple[int, int, str]]) -> tuple[int, int, str]:
        seen[0] += 1
        return pop(heap)

    pop = by_owner.heappop
    monkeypatch.setattr(by_owner, "heappop", counted)
    for key in range(10_000, 12_000):
        gone = space.victim("new", 1)
        assert gone is not None
        space.remove(gone)
        space.add(key, "new", 1)
    assert seen[0] <= 4 * 2000
    assert len(space._heap) <= 2 * 10_000 + by_owner.SPARE
