"""The prefix tree with several groups, against a brute-force model of sets: hits, pins, holes and counts.

`make test-all` runs 100,000 operations for each mix of groups, as the design asks; else a few thousand.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from dovetail.cache.node import Node
from dovetail.cache.radix import RadixTree
from dovetail.contracts.cache import FULL, Chunk, Full, Reach, Recurrent, Window

PAGE = 3
MIXES: dict[str, tuple[Reach, ...]] = {
    "full": (FULL,),
    "two shapes": (FULL, FULL),
    "window": (FULL, Window(8)),
    "windows alone": (Window(8), Window(4)),
    "window and chunk": (FULL, Window(7), Chunk(12)),
    "state": (FULL, Recurrent(6)),
    "all": (FULL, Window(1), Window(20), Chunk(9), Recurrent()),
}
Prefix = tuple[int, ...]


@dataclass(eq=False)
class Lock:
    """A request that holds a prefix of `num` pages, and of each partial group its pages from `firsts` on."""

    ids: Prefix
    num: int
    node: Node
    firsts: list[int]
    seen: dict[int, set[int]] = field(default_factory=dict)


class Oracle:
    """What is cached, as sets: for each group, the page of each prefix of whole pages."""

    def __init__(self, reaches: Sequence[Reach], seed: int) -> None:
        self.rng = random.Random(seed)
        self.reaches = reaches
        self.tree = RadixTree(PAGE, reaches)
        self.cached: list[dict[Prefix, int]] = [{} for _ in reaches]
        self.keys: set[Prefix] = set()
        self.locks: list[Lock] = []
        self.num_made = [0 for _ in reaches]
        self.counts: Counter[str] = Counter()

    def first(self, group: int, num: int) -> int:
        """The first page that is seen behind `num` pages, by looking at every token."""
        reach = self.reaches[group]
        if isinstance(reach, Recurrent):
            return max(0, num - 1)
        query = num * PAGE
        seen = [p for p in range(query) if reach.start(query) <= p]
        return min(seen) // PAGE if seen else num

    def is_hit(self, ids: Prefix, num: int) -> bool:
        """Whether every group has what is seen from there."""
        return all(
            ids[: (i + 1) * PAGE] in self.cached[g]
            for g in range(len(self.reaches))
            for i in range(self.first(g, num), num)
        )

    def longest(self, ids: Prefix) -> int:
        """The most pages of `ids` that one may go on from."""
        return max(n for n in range(len(ids) // PAGE + 1) if self.is_hit(ids, n))

    def new_ids(self) -> Prefix:
        """Short ids from a tiny alphabet, often those of a lock with some more."""
        head = list(self.rng.choice(self.locks).ids) if self.locks and self.rng.random() < 0.5 else []
        return tuple((head + [self.rng.randrange(2) for _ in range(self.rng.randrange(30))])[:60])

    def match(self) -> None:
        """The hit is the longest that there is, with the pages that will be seen; then it may be locked."""
        ids = self.new_ids()
        want = self.longest(ids)
        assert self.tree.count(ids) == want
        pages, node = self.tree.match(ids)
        for g, reach in enumerate(self.reaches):
            first = self.first(g, want)
            own = [self.cached[g][ids[: (i + 1) * PAGE]] for i in range(first, want)]
            assert pages[g] == [0] * first + own, (g, reach)
        self.counts["hit" if want else "miss"] += 1
        if want and self.rng.random() < 0.5:
            self.lock(ids, want, node)

    def lock(self, ids: Prefix, num: int, node: Node) -> None:
        """Hold a prefix: what is seen behind it, or some more."""
        partial = [g for g, reach in enumerate(self.reaches) if not isinstance(reach, Full)]
        lock = Lock(ids[: num * PAGE], num, node, [])
        for g in partial:
            first, wanted = num, self.first(g, num)
            while first > 0 and ids[: first * PAGE] in self.cached[g] and (first > wanted or self.rng.random() < 0.3):
                first -= 1
            lock.firsts.append(first)
            lock.seen[g] = {self.cached[g][ids[: (i + 1) * PAGE]] for i in range(first, num)}
        self.tree.lock(node, lock.firsts)
        self.locks.append(lock)

    def insert(self) -> None:
        """Add a prefix of which partial groups have the end; holes are filled, doubles are not."""
        ids = self.new_ids()
        num = len(ids) // PAGE
        pages: list[list[int]] = []
        for g, reach in enumerate(self.reaches):
            whole = isinstance(reach, Full)
            start = 0 if whole else self.rng.randrange(num + 1)
            mine = [i >= start and (not isinstance(reach, Recurrent) or self.rng.random() < 0.5) for i in range(num)]
            pages.append([self.make(g) if is_mine else 0 for is_mine in mine])
        if not any(map(any, pages)):
            return  # nothing to own
        found, node = self.tree.insert(ids, pages)
        assert node.end == num
        for i in range(num):
            prefix = ids[: (i + 1) * PAGE]
            self.keys.add(prefix)
            for g in range(len(self.reaches)):
                if pages[g][i]:
                    assert found[g][i] == self.cached[g].setdefault(prefix, pages[g][i])
                else:
                    assert found[g][i] == 0
        if num and self.rng.random() < 0.3:
            self.lock(ids, num, node)

    def make(self, group: int) -> int:
        """A page that nobody has had."""
        self.num_made[group] += 1
        return self.num_made[group]

    def unlock(self) -> None:
        """Let a prefix go."""
        if self.locks:
            lock = self.locks.pop(self.rng.randrange(len(self.locks)))
            self.tree.unlock(lock.node, lock.firsts)

    def slide(self) -> None:
        """See less of what is held."""
        if self.locks:
            lock = self.rng.choice(self.locks)
            for i, (g, partial) in enumerate(self.tree.partial.items()):
                first = self.rng.randrange(lock.firsts[i], lock.num + 1)
                partial.unpin(lock.node, lock.firsts[i], first)
                lock.firsts[i] = first
                lock.seen[g] = {self.cached[g][lock.ids[: (k + 1) * PAGE]] for k in range(first, lock.num)}

    def held(self, group: int) -> set[int]:
        """The pages that may not go."""
        if not isinstance(self.reaches[group], Full):
            return set().union(*(lock.seen[group] for lock in self.locks))
        paths = {lock.ids[: (i + 1) * PAGE] for lock in self.locks for i in range(lock.num)}
        return {self.cached[group][p] for p in paths}

    def evict(self) -> None:
        """As much goes as was asked for or can go; nothing that is held; whole prefixes, from their ends."""
        need = [self.rng.randrange(8 + len(own) // 4) if self.rng.random() < 0.6 else 0 for own in self.cached]
        free = [len(own) - len(self.held(g)) for g, own in enumerate(self.cached)]
        gone = self.tree.evict(need)
        for g, pages in enumerate(gone):
            assert len(pages) >= min(need[g], free[g])
            assert not self.held(g) & set(pages)
        self.drop(gone)

    def cut(self) -> None:
        """Every node with a page goes with all below it, whoever holds it."""
        found = [g for g, own in enumerate(self.cached) if own]
        if not found:
            return
        group = self.rng.choice(found)
        prefix, page = self.rng.choice(list(self.cached[group].items()))
        for lock in [x for x in self.locks if x.ids[: len(prefix)] == prefix]:
            self.locks.remove(lock)
            self.tree.unlock(lock.node, lock.firsts)
        gone = self.tree.discard_nodes([{page} if g == group else set() for g in range(len(self.reaches))])
        self.drop(gone)
        assert not any(p[: len(prefix)] == prefix for own in self.cached for p in own)
        self.locks = [lock for lock in self.locks if self.tree.path(lock.node)]
        self.tree.relock((lock.node, lock.firsts) for lock in self.locks)

    def punch(self) -> None:
        """Some pages of a partial group go where they stand, claimed or not; who sees them has let go before."""
        g = self.rng.randrange(len(self.reaches))
        if isinstance(self.reaches[g], Full) or not self.cached[g]:
            return
        bad = set(self.rng.sample(sorted(self.cached[g].values()), min(3, len(self.cached[g]))))
        for lock in [x for x in self.locks if x.seen[g] & bad]:
            self.locks.remove(lock)
            self.tree.unlock(lock.node, lock.firsts)
        gone = self.tree.discard([bad if i == g else set() for i in range(len(self.reaches))])
        assert sorted(gone[g]) == sorted(bad & set(self.cached[g].values()))
        assert not any(pages for i, pages in enumerate(gone) if i != g)
        self.drop(gone)

    def drop(self, gone: Sequence[Sequence[int]]) -> None:
        """Forget pages; those of a `Full` group take what the others have for the same prefix."""
        for g, pages in enumerate(gone):
            assert len(set(pages)) == len(pages)
            assert set(pages) <= set(self.cached[g].values())
            lost = {prefix for prefix, page in self.cached[g].items() if page in set(pages)}
            self.cached[g] = {prefix: page for prefix, page in self.cached[g].items() if prefix not in lost}
        full = [g for g, reach in enumerate(self.reaches) if isinstance(reach, Full)]
        for g in full:
            assert all(prefix[:-PAGE] in self.cached[g] for prefix in self.cached[g] if len(prefix) > PAGE)
            for own in self.cached:
                assert own.keys() <= self.cached[g].keys()

    def check(self) -> None:
        """The counts agree, and the tree holds what it should."""
        for g, own in enumerate(self.cached):
            assert self.tree.num_pages(g) == len(own)
            assert self.tree.num_free_to_go(g) == len(own) - len(self.held(g))

    def check_nodes(self) -> None:
        """Every page stands where it belongs."""
        found: list[dict[Prefix, int]] = [{} for _ in self.reaches]
        for node in self.tree.nodes():
            path = self.tree.path(node)
            ids = tuple(i for at in path for i in at.key)
            assert node.end * PAGE == len(ids)
            start = node.end - len(node.pages[0])
            for g, pages in enumerate(node.pages):
                assert len(pages) == len(node.key) // PAGE
                found[g] |= {ids[: (start + i + 1) * PAGE]: page for i, page in enumerate(pages) if page}
        assert found == self.cached


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num", [2_000, pytest.param(100_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("mix", MIXES)
def test_random_operations_agree_with_sets(mix: str, num: int) -> None:
    """Hits, pages, holes, pins and counts after every operation; nothing is left when all is let go and evicted."""
    oracle = Oracle(MIXES[mix], seed=len(mix))
    actions = [oracle.match] * 4 + [oracle.insert] * 3 + [oracle.unlock] * 2 + [oracle.slide, oracle.evict]
    for number in range(num):
        oracle.rng.choice(actions)()
        if oracle.rng.random() < 0.01:
            oracle.rng.choice([oracle.cut, oracle.punch])()
        if len(oracle.locks) > 12:
            oracle.unlock()
        oracle.check()
        if number % 50 == 0:
            oracle.check_nodes()
    assert oracle.counts["hit"] > num / 20
    while oracle.locks:
        oracle.unlock()
    oracle.drop(oracle.tree.clear())
    oracle.check()
    assert not any(oracle.cached)
    assert list(oracle.tree.nodes()) == []


WINDOWED = (FULL, Window(2 * PAGE))


def pages(*numbers: int) -> list[list[int]]:
    """The same pages of both groups."""
    return [list(numbers), list(numbers)]


def test_what_nobody_can_go_on_with_goes_before_whole_windows() -> None:
    """First pages in no last window, then whole last windows, least recently used first; prefixes stay."""
    tree = RadixTree(PAGE, WINDOWED)
    old, new = [1] * 6 * PAGE, [2] * 6 * PAGE
    tree.insert(old, pages(1, 2, 3, 4, 5, 6))
    tree.insert(new, pages(11, 12, 13, 14, 15, 16))
    assert tree.evict([0, 1]) == [[], [1]]
    tree.match(old)
    assert sorted(tree.evict([0, 7])[1]) == [2, 3, 4, 11, 12, 13, 14]
    assert [tree.count(ids) for ids in (old, new)] == [6, 6]
    assert tree.evict([0, 1])[1] == [15]
    assert [tree.count(ids) for ids in (old, new)] == [6, 0]
    assert tree.evict([0, 2])[1] == [16, 5]
    assert [tree.count(ids) for ids in (old, new)] == [0, 0]
    assert (tree.num_pages(0), tree.num_pages(1)) == (12, 1)


def test_a_window_in_use_stays_and_what_is_behind_it_goes() -> None:
    """A request's pins protect pages, not its path; what it has left behind can be taken from under it."""
    tree = RadixTree(PAGE, WINDOWED)
    ids = [1] * 6 * PAGE
    _, node = tree.insert(ids, pages(1, 2, 3, 4, 5, 6))
    tree.lock(node, [4])
    assert tree.evict([9, 9]) == [[], [1, 2, 3, 4]]
    tree.partial[1].unpin(node, 4, 5)
    assert tree.evict([9, 9]) == [[], [5]]
    tree.unlock(node, [5])
    assert tree.evict([9, 0]) == [[1, 2, 3, 4, 5, 6], [6]]


def test_a_hole_is_filled_by_whoever_computes_it_again() -> None:
    """The tree takes the page, the caller's others are doubles; the prefix can be gone on from again."""
    tree = RadixTree(PAGE, WINDOWED)
    ids = [1] * 4 * PAGE
    tree.insert(ids, pages(1, 2, 3, 4))
    assert tree.evict([0, 4])[1] == [1, 2, 3, 4]
    assert tree.count(ids) == 0
    found, _ = tree.insert(ids, [[21, 22, 23, 24], [0, 0, 33, 34]])
    assert found == [[1, 2, 3, 4], [0, 0, 33, 34]]
    assert tree.match(ids)[0] == [[1, 2, 3, 4], [0, 0, 33, 34]]


def test_a_hit_ends_where_all_groups_can_go_on() -> None:
    """Behind a hole in what is seen from there, at the one before it."""
    tree = RadixTree(PAGE, (FULL, Window(2 * PAGE), Recurrent()))
    ids = [1] * 6 * PAGE
    tree.insert(ids, [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 0, 6], [1, 0, 3, 0, 0, 6]])
    assert tree.count(ids) == 3
    assert tree.match(ids)[0] == [[1, 2, 3], [0, 2, 3], [0, 0, 3]]
    assert tree.count(ids[: 2 * PAGE]) == 1


def test_what_is_kept_of_windows_does_not_grow() -> None:
    """However often prefixes come, are used and go, the queues hold about as many entries as there are nodes."""
    tree = RadixTree(PAGE, WINDOWED)
    for i in range(3000):
        ids = [i % 40, i % 7, i % 11] * 4
        _, node = tree.insert(ids, pages(*range(4 * i + 1, 4 * i + 5)))
        tree.lock(node, [0])
        tree.partial[1].unpin(node, 0, 2)
        tree.unlock(node, [2])
        tree.match(ids)
        tree.evict([4 if i % 3 else 0, 3 if i % 5 else 0])
    windows = tree.partial[1]
    assert len(windows._queue) + len(windows._aside) + len(windows._loose) <= 3 * len(list(tree.nodes())) + 64
    tree.clear()
    assert (windows._pins, windows._num_claims, windows._claims, len(windows._loose)) == ({}, {}, {}, 0)
