"""The order of decode rows that share prefixes, and when it is worth changing."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest

from dovetail.engine.step_builder import MIN_SAVED_TOKENS, PrefixOrder, common_pages, saved_pages

SIZE = 16
IDS: dict[Any, int] = {}


def page(*key: Any) -> int:
    """A page id that stands for nothing else."""
    return IDS.setdefault(key, len(IDS) * 7919 % 1_000_003)


def request(name: str, *parts: tuple[str, int]) -> Any:
    """A request whose pages are those of its parts, `(prefix, pages)`; a part's pages are the same in every request."""
    pages = [page(part, i) for part, num in parts for i in range(num)]
    return Mock(pages=[pages], computed_len=len(pages) * SIZE - 1, name=name)


def family(prefix: str, num: int, pages: int = 128, own: int = 8) -> list[Any]:
    """Requests behind one prefix."""
    return [request(f"{prefix}{i}", (prefix, pages), (f"{prefix}{i}", own)) for i in range(num)]


def mixed(*families: list[Any]) -> list[Any]:
    """All requests in random order."""
    requests = [member for members in families for member in members]
    random.Random(1).shuffle(requests)
    return requests


def saved(found: list[Any] | None, group: int) -> list[int]:
    """Pages that each group saves."""
    assert found is not None
    rows = [found[i : i + group] for i in range(0, len(found), group)]
    return [saved_pages([common_pages(a.pages[0], b.pages[0]) for a, b in pairwise(row)]) for row in rows]


def test_the_best_run_of_a_group_is_found() -> None:
    """As trying all runs says."""
    rng = random.Random(4)
    for _ in range(200):
        common = [rng.choice((0, 1, 2, 3, 9, 50)) for _ in range(rng.randrange(16))]
        spans = [common[i:j] for j in range(len(common) + 1) for i in range(j)]
        assert saved_pages(common) == max((min(span) * len(span) for span in spans), default=0)


def test_common_pages_are_counted() -> None:
    """Leading pages that two lists share, whatever their lengths."""
    for one, other, want in (
        ([], [1], 0),
        ([1], [2], 0),
        ([1], [1], 1),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([7, *range(100)], [7, *range(50), -1], 51),
    ):
        assert common_pages(one, other) == common_pages(other, one) == want


def test_rows_of_one_prefix_stand_side_by_side() -> None:
    """Two families in random order: every group is of one of them, and nobody is lost."""
    requests = mixed(family("a", 16), family("b", 8, pages=100))
    found = PrefixOrder(8, SIZE).order(requests)
    assert sorted(saved(found, 8)) == [700, 896, 896]
    assert found is not None
    assert {id(r) for r in found} == {id(r) for r in requests}


def test_a_family_need_not_fill_its_groups() -> None:
    """Where groups hold the end of one family and the start of another, the longer run is shared."""
    found = PrefixOrder(8, SIZE).order(mixed(family("a", 11), family("b", 11), family("c", 11)))
    assert saved(found, 8) == [128 * n for n in (7, 4, 5, 7, 0)]


def test_a_longer_prefix_within_a_shorter_one_is_found() -> None:
    """All begin alike and most go on alike: a group of these shares what they have in common."""
    start = ("system", 64)
    long = [request(f"l{i}", start, ("long", 64), (f"l{i}", 4)) for i in range(10)]
    short = [request(f"s{i}", start, (f"s{i}", 4)) for i in range(6)]
    found = PrefixOrder(8, SIZE).order(mixed(long, short))
    assert sum(saved(found, 8)) > 64 * 14


@pytest.mark.parametrize(
    ("requests", "pays"),
    [
        (family("a", 64, pages=0), False),
        (family("a", 1), False),
        ([], False),
        (family("a", 3, pages=128), True),
        (family("a", 3, pages=127), False),
        (family("a", 8, pages=64, own=60), True),
        (family("a", 8, pages=64, own=200), False),
        (family("a", 8) + family("b", 100, pages=0, own=10), True),
        (family("a", 8) + family("b", 100, pages=0, own=40), False),
        ([Mock(pages=[[]], computed_len=0)] * 3, False),
    ],
)
def test_it_must_pay(requests: list[Any], pays: bool) -> None:
    """At least 4,096 tokens and a third of all that the batch would read are saved, or the order stays."""
    assert MIN_SAVED_TOKENS == 2 * 128 * SIZE
    assert (PrefixOrder(16, SIZE).order(requests) is not None) == pays


def test_it_looks_again_only_when_the_batch_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing requests keep their order; another request, or one that came back with other pages, does not."""
    prefixes = PrefixOrder(8, SIZE)
    find = Mock(side_effect=prefixes._find)
    monkeypatch.setattr(prefixes, "_find", find)
    requests = mixed(family("a", 8))
    first = prefixes.order(requests)
    assert first is not None
    for r in requests:
        r.pages[0].append(page("new", id(r)))
    assert prefixes.order(list(requests)) == first
    assert find.call_count == 1
    [other] = family("z", 1)
    changed = [*requests[:-1], other]
    assert other in (prefixes.order(changed) or [])
    assert find.call_count == 2
    requests[0].pages = [[-5, *requests[0].pages[0]]]
    prefixes.order(changed)
    assert find.call_count == 3
    assert prefixes.order(requests[:3]) == prefixes.order(requests[:3])
    assert find.call_count == 4
    prefixes.order(requests[:3][::-1])
    assert find.call_count == 5


def test_any_batch_is_only_reordered() -> None:
    """Whatever the prefixes, lengths and page sizes: the same requests, each once."""
    rng = random.Random(2)
    for size in (1, 16, 64, 256):
        for group in (2, 8, 16):
            families = [family(str(i), rng.randrange(1, 20), rng.randrange(900), rng.randrange(9)) for i in range(4)]
            requests = mixed(*families)
            found = PrefixOrder(group, size).order(requests)
            assert found is None or sorted(map(id, found)) == sorted(map(id, requests))
