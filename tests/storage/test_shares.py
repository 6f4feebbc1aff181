"""Whose lines run when several batches wait: owners in turn, and the batches of each in turn, whatever their size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from dovetail_server.batches.lines import Leased
from dovetail_server.batches.runner import OwnerQueue, quotas

from .conftest import Api, line

LARGE, SMALL, LIMIT = 300, 5, 8


def leased(owner: str, batch_id: str, line_no: int) -> Leased:
    return Leased(
        process="p",
        batch_id=batch_id,
        owner=owner,
        endpoint="",
        line_no=line_no,
        custom_id="",
        offset=0,
        length=0,
        attempt=1,
    )


def done_when_small_ends(api: Api, large: str, small: str) -> int:
    api.wait(small)
    return int(api.batch(large)["request_counts"]["completed"])


def owners_begun(servers: list[Any]) -> list[str]:
    """Return a list that grows by the owner of each line that one of the servers begins."""
    begun: list[str] = []

    def noted(submit: Callable[..., Any]) -> Callable[..., Any]:
        def run(request: Any, **options: Any) -> Any:
            begun.append(request.owner)
            return submit(request, **options)

        return run

    for server in servers:
        server.engine.submit = noted(server.engine.submit)
    return begun


@pytest.mark.full
def test_a_small_batch_behind_a_large_one_ends_soon(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """Five lines behind three hundred of the same owner wait for some of them, not for all."""
    api = Api(make_harness(file_storage_path=tmp_path, min_free_disk_bytes=0, max_batch_requests=LIMIT))
    api.harness.engine.delay_s = 0.003
    large = api.start(*(line(f"l{i}") for i in range(LARGE)))
    api.harness.eventually(lambda: api.batch(large)["request_counts"]["completed"] > 10)
    before = api.batch(large)["request_counts"]["completed"]
    small = api.start(*(line(f"s{i}") for i in range(SMALL)))
    assert done_when_small_ends(api, large, small) - before < LARGE // 3
    assert api.wait(large)["request_counts"]["completed"] == LARGE


@pytest.mark.full
def test_owners_have_equal_shares_whatever_they_ask_for(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """One owner with eight batches does not push another's one aside, on two servers that share the folder."""
    options = {"file_storage_path": tmp_path, "min_free_disk_bytes": 0, "max_batch_requests": LIMIT}
    servers = [make_harness(**options, api_key=["one", "two"]) for _ in range(2)]
    apis = {}
    for key, server in zip(("one", "two"), servers, strict=True):
        server.engine.delay_s = 0.003
        server.http.headers["authorization"] = f"Bearer {key}"
        assert server.get("/v1/files").status_code == 200
        apis[key] = Api(server)
    begun = owners_begun(servers)
    many = [apis["one"].start(*(line(f"{n}-{i}") for i in range(40))) for n in range(8)]
    apis["one"].harness.eventually(lambda: len(begun) > 5)
    single = apis["two"].start(*(line(f"x{i}") for i in range(30)))
    apis["two"].wait(single)
    other = begun[0]
    mine = [place for place, owner in enumerate(begun) if owner != other]
    assert len(mine) == 30
    # In turn it is 30, and some more where a look at the folder comes late; by batches it would be 240.
    assert begun[mine[0] : mine[-1]].count(other) < 120
    for each in many:
        apis["one"].wait(each)


@pytest.mark.full
def test_more_batches_than_are_looked_at_do_not_hide_another_owner(
    make_harness: Callable[..., Any], tmp_path: Path, monkeypatch: Any
) -> None:
    """Of each owner the oldest batch is seen first, so that a crowd of one owner's does not fill the view."""
    from dovetail_server.batches import store

    monkeypatch.setattr(store, "MAX_SEEN", 3)
    server = make_harness(
        file_storage_path=tmp_path, min_free_disk_bytes=0, max_batch_requests=2, api_key=["one", "two"]
    )
    server.http.headers["authorization"] = "Bearer one"
    server.engine.delay_s = 0.002
    crowd = Api(server)
    many = [crowd.start(*(line(str(i)) for i in range(10))) for _ in range(6)]
    with requests.Session() as other:
        other.headers["authorization"] = "Bearer two"
        server.http, before = other, server.http
        assert crowd.run(line("a"))["status"] == "completed"
        server.http = before
    assert any(crowd.batch(each)["status"] != "completed" for each in many)
    for each in many:
        crowd.wait(each)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), max_size=60))
def test_the_queue_serves_owners_and_their_batches_in_turn(names: list[tuple[str, str]]) -> None:
    """While several owners wait, none is served twice in a row; nothing is lost, and lines keep their order."""
    queue = OwnerQueue()
    lines = [leased(owner, owner + batch, n) for n, (owner, batch) in enumerate(names)]
    queue.extend(lines)
    assert queue.keys() == {each.key for each in lines}
    taken: list[Leased] = []
    while queue:
        waiting = {each.owner for each in lines if each not in taken}
        taken.append(queue.popleft())
        if len(waiting) > 1 and len(taken) > 1:
            assert taken[-1].owner != taken[-2].owner
    assert sorted(each.line_no for each in taken) == list(range(len(names)))
    for batch_id in {each.batch_id for each in lines}:
        numbers = [each.line_no for each in taken if each.batch_id == batch_id]
        assert numbers == sorted(numbers)


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=20),
    st.integers(0, 100),
    st.integers(0, 8),
    st.lists(st.integers(0, 20), min_size=20, max_size=20),
)
def test_what_is_leased_is_divided_evenly(owners: list[str], room: int, first: int, has: list[int]) -> None:
    """No more than there is room for, but for first lines; owners differ by one line where they began equal."""
    rows = [{"id": f"{owner}{n}", "owner": owner} for n, owner in enumerate(owners)]
    held = {row["id"]: num for row, num in zip(rows, has, strict=False)}
    found = quotas(rows, held, room, first)
    assert sum(found.values()) <= max(room, min(first, len(rows)))
    assert sum(found.values()) >= room
    fresh = quotas(rows, {}, room, 0)
    sums = [sum(num for batch_id, num in fresh.items() if batch_id[0] == owner) for owner in set(owners)]
    assert max(sums) - min(sums) <= 1
