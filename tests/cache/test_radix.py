"""The radix tree against a plain model: a set of cached prefixes, page by page."""

from __future__ import annotations

import random
from array import array

from hypothesis import given
from hypothesis import strategies as st

from dovetail.cache.radix import RadixTree
from dovetail.engine.kv_cache_manager import PageAllocator

PAGE = 3


def fresh_ids(rng: random.Random) -> array[int]:
    """Short ids from a tiny alphabet, so that prefixes are often shared."""
    return array("i", [rng.randrange(2) for _ in range(rng.randrange(0, 24))])


def test_a_match_is_the_longest_inserted_prefix_in_whole_pages() -> None:
    """What was inserted is found again, up to the last full page that agrees."""
    tree = RadixTree(PAGE)
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8, 9], [[10, 11, 12]])
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 8, 9, 1])[0][0] == [10, 11, 12]
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 0, 0])[0][0] == [10, 11]
    assert tree.match([1, 2])[0][0] == []


def test_salts_never_share() -> None:
    """The same ids under another salt are not found."""
    tree = RadixTree(PAGE)
    tree.insert([1, 2, 3], [[5]], "tenant-a")
    assert tree.match([1, 2, 3], "tenant-b")[0][0] == []
    assert tree.match([1, 2, 3])[0][0] == []


def test_a_locked_path_is_not_evicted_and_an_unlocked_one_is() -> None:
    """Eviction takes unlocked leaves only, and everything once nothing is locked."""
    tree = RadixTree(PAGE)
    tree.insert([1, 2, 3, 4, 5, 6], [[1, 2]])
    _, node = tree.insert([1, 2, 3, 7, 8, 9], [[1, 3]])
    tree.lock(node)
    assert tree.evict([10])[0] == [2]
    assert (tree.num_locked, tree.num_evictable) == (2, 0)
    tree.unlock(node)
    assert sorted(tree.evict([10])[0]) == [1, 3]
    assert tree.num_pages() == 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    """A leaf that was matched since outlives one that was not."""
    tree = RadixTree(PAGE)
    tree.insert([1, 1, 1], [[1]])
    tree.insert([2, 2, 2], [[2]])
    tree.match([1, 1, 1])
    assert tree.evict([1])[0] == [2]


def test_the_queue_of_leaves_has_one_entry_a_node() -> None:
    """However often a path is locked and unlocked, or cut out, what is kept does not grow."""
    tree = RadixTree(PAGE)
    for i in range(20):
        _, node = tree.insert([i, i, i, 1, 1, 1], [[2 * i + 1, 2 * i + 2]])
        for _ in range(1000):
            tree.lock(node)
            tree.unlock(node)
    assert len(tree._leaves) <= 20
    for i in range(20):
        assert sorted(tree.discard_nodes([{2 * i + 1}])[0]) == [2 * i + 1, 2 * i + 2]
    assert (tree._leaves, tree.num_pages()) == ([], 0)


def test_nothing_is_kept_of_a_salt_without_pages() -> None:
    """Looking up prefixes under new salts keeps nothing, and evicting the last page of one forgets it."""
    tree = RadixTree(PAGE)
    for i in range(100):
        tree.match([1, 2, 3], f"tenant {i}")
        tree.insert([1, 2], [[]], f"tenant {i}")
    assert tree._roots == {}
    tree.insert([1, 2, 3], [[7]], "a")
    tree.insert([1, 2, 3], [[8]], "b")
    assert tree.evict([1])[0] == [7]
    assert list(tree._roots) == ["b"]
    assert tree.discard_nodes([{8}])[0] == [8]
    assert (tree._roots, tree._salts) == ({}, {})


def test_a_cut_takes_all_below_it_and_nothing_else() -> None:
    """Locked or not; what stands beside or above stays, and can be evicted."""
    tree = RadixTree(PAGE)
    tree.insert([1, 1, 1, 2, 2, 2, 3, 3, 3], [[1, 2, 3]])
    _, other = tree.insert([1, 1, 1, 4, 4, 4], [[1, 4]])
    _, below = tree.insert([1, 1, 1, 2, 2, 2, 5, 5, 5], [[1, 2, 5]])
    tree.lock(below)
    assert sorted(tree.discard_nodes([{2}])[0]) == [2, 3, 5]
    assert (tree.num_locked, tree.num_evictable) == (1, 1)
    assert tree.match([1, 1, 1, 2, 2, 2])[0][0] == [1]
    assert [page for node in tree.path(other) for page in node.pages[0]] == [1, 4]
    tree.relock([])
    assert sorted(tree.evict([9])[0]) == [1, 4]


@given(st.integers(0, 2**32))
def test_random_histories_agree_with_a_plain_model(seed: int) -> None:
    """After any mix of insert, match, lock, unlock and evict: right matches, and no page lost or owned twice."""
    rng = random.Random(seed)
    allocator, tree = PageAllocator(200), RadixTree(PAGE)
    cached: dict[tuple[int, ...], int] = {}
    locks = []
    for _ in range(rng.randrange(5, 60)):
        ids, action = fresh_ids(rng), rng.randrange(4)
        num = len(ids) // PAGE
        if action == 0 and allocator.num_free >= num:
            mine = allocator.allocate(num)
            [theirs], _ = tree.insert(ids, [mine])
            allocator.free([a for a, b in zip(mine, theirs, strict=True) if a != b])
            for i, page in enumerate(theirs):
                assert cached.setdefault(tuple(ids[: (i + 1) * PAGE]), page) == page
        elif action == 1:
            [pages], node = tree.match(ids)
            want = []
            while (page := cached.get(tuple(ids[: (len(want) + 1) * PAGE]))) is not None and len(want) < num:
                want.append(page)
            assert pages == want
            tree.lock(node)
            locks.append((node, set(pages)))
        elif action == 2 and locks:
            tree.unlock(locks.pop(rng.randrange(len(locks)))[0])
        else:
            [gone] = tree.evict([rng.randrange(6)])
            held = set().union(*(pages for _, pages in locks)) if locks else set()
            assert not held & set(gone)
            allocator.free(gone)
            cached = {key: page for key, page in cached.items() if page not in gone}
        assert tree.num_pages() == len(cached)
        assert allocator.num_free + tree.num_pages() == allocator.num_pages
    for node, _ in locks:
        tree.unlock(node)
    assert tree.num_locked == 0
    assert len(tree.clear()[0]) == len(cached)
