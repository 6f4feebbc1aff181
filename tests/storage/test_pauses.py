"""A server stopped at every step of a batch, and clocks that jump: every id exactly once, and the files are there."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .conftest import jsonl, line
from .processes import Killable

NUM_LINES = 5
HOW_MANY = pytest.mark.parametrize("takes_all", [False, pytest.param(True, marks=pytest.mark.full)])
"""A few of the steps, or all of them."""
FEW = 4
ENDED = ("completed", "cancelled", "expired", "failed")
IDS = [f"id-{i}" for i in range(NUM_LINES)]


class Pair:
    """Two servers on one folder: one that is stopped, and one that takes over."""

    def __init__(self, victim: Killable, survivor: Killable) -> None:
        self.victim = victim
        self.survivor = survivor

    def let_survivor_work(self, works: bool) -> None:
        """It lives and counts its beats all the time, but looks after batches only when it may."""
        self.survivor.ask("serve", *(["tiny", "tiny-too"] if works else ["nothing"]))

    def start(self) -> str:
        uploaded = self.victim.api.upload(jsonl(*(line(each) for each in IDS))).json()["id"]
        body = {"input_file_id": uploaded, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self.victim.post("/v1/batches", body).json()["id"])

    def check(self, batch_id: str) -> str:
        """Both servers show the batch and its files, and every id stands in them once."""
        for server in (self.survivor, self.victim):
            batch = server.api.wait(batch_id)
            outputs, errors = server.api.results(batch)
            began = batch.get("in_progress_at") is not None  # or it was cancelled before that, and has no results
            assert sorted(each["custom_id"] for each in outputs + errors) == (IDS if began else [])
            if batch["status"] == "completed":
                assert not errors
                assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        return str(batch["status"])


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from pair_of(folder, tmp_path_factory.mktemp("shared"))


def pair_of(folder: Path, storage: Path, **more: Any) -> Iterator[Pair]:
    settings = {"file_storage_path": storage, "beat_s": 0.05, "silent_beats": 4, "steps": True, **more}
    with Killable(folder, **settings) as victim, Killable(folder, **settings) as survivor:
        for server in (victim, survivor):
            assert server.get("/v1/files").status_code == 200
            server.ask("watch")
        yield Pair(victim, survivor)


def becomes(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def result_of(work: Future[str], victim: Killable) -> str:
    """Wait for a thread's work; the victim is woken, also where its step comes only now, on a busy machine."""
    while not work.done():
        if victim.is_stopped:
            victim.go_on()
        time.sleep(0.005)
    return work.result()


def steps_of(pair: Pair, work: Callable[[], Any], takes_all: bool) -> list[tuple[str, int]]:
    """Return the steps of a piece of work, undisturbed, without those that go on anyway."""
    pair.let_survivor_work(False)
    pair.victim.ask("sites")
    time.sleep(0.5)
    idle = pair.victim.ask("sites")
    work()
    found = {site: num for site, num in pair.victim.ask("sites").items() if site not in idle}
    wanted = [(site, n) for site in sorted(found) for n in range(1, min(found[site], 2 if takes_all else 1) + 1)]
    return wanted if takes_all else wanted[:: max(1, len(wanted) // FEW)]


def stop(pair: Pair, site: str, occurrence: int, work: Callable[[Pair], str], patience: float = 1.0) -> str:
    """Stop the victim at a step of a piece of work, let the survivor end the batch, wake the victim, and look.

    `patience` multiplies how long is waited for what need not come: 1 where many steps are tried, more where one
    outcome alone is right.

    Returns:
        `missed` where the step did not come, `in a request` where it is one of an upload, `locked` where it is one of a
        transaction that keeps the survivor from writing until it goes on, else the batch's state when the victim woke.
    """
    pair.let_survivor_work(False)
    pair.victim.ask("arm", site, occurrence)
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, pair)
        becomes(lambda: working.done() or pair.victim.is_stopped, 10.0)
        is_stopped = becomes(lambda: pair.victim.is_stopped, 0.7 * patience)
        pair.let_survivor_work(True)
        found = "missed"
        if is_stopped and becomes(working.done, 0.3 * patience):
            batch_id = working.result()
            has_ended = becomes(lambda: pair.survivor.api.batch(batch_id)["status"] in ENDED, 1.5 * patience)
            found = str(pair.survivor.api.batch(batch_id)["status"]) if has_ended else "locked"
        elif is_stopped:
            found = "in a request"
        batch_id = result_of(working, pair.victim)
        result_of(pool.submit(pair.victim.ask, "disarm"), pair.victim)
    pair.check(batch_id)
    if is_stopped:
        time.sleep(0.05)  # what it does late
        pair.check(batch_id)
    return found


@HOW_MANY
def test_a_stop_at_every_step_of_a_batch_loses_and_repeats_nothing(pair: Pair, takes_all: bool) -> None:
    """The other server ends the batch meanwhile; who wakes up late neither removes nor adds anything."""
    sites = steps_of(pair, lambda: pair.check(pair.start()), takes_all)
    found = Counter(stop(pair, site, occurrence, Pair.start) for site, occurrence in sites)
    print(f"{len(sites)} steps: {dict(found)}")
    assert found["missed"] <= len(sites) // 2, found
    assert found["completed"] > 0, found


@HOW_MANY
def test_a_stop_at_every_step_of_a_cancellation(pair: Pair, takes_all: bool) -> None:
    """As above for a batch that is cancelled while it runs: every id stands in its files once, answered or not."""

    def cancelled(pair: Pair) -> str:
        batch_id = pair.start()
        assert pair.victim.post(f"/v1/batches/{batch_id}/cancel").status_code in (200, 409)
        return batch_id

    found_steps = steps_of(pair, lambda: pair.check(cancelled(pair)), takes_all)
    sites = [each for each in found_steps if "receive_file" not in each[0]]
    found = Counter(stop(pair, site, occurrence, cancelled) for site, occurrence in sites)
    print(f"{len(sites)} steps: {dict(found)}")
    assert found["missed"] < len(sites), found


@pytest.mark.parametrize("jumps", [(3600, -3600), (-3600, -3600)])
def test_clocks_that_jump_neither_repeat_nor_starve(pair: Pair, jumps: tuple[int, int]) -> None:
    """An hour off, of one server, the other, or both, while they share batches: all end as if nothing was."""
    servers = (pair.victim, pair.survivor)
    pair.let_survivor_work(True)
    batch_ids = []
    for turn in range(6):
        batch_ids.append(pair.start())
        for server, seconds in zip(servers, jumps, strict=True):
            server.ask("clock", seconds if turn % 2 == 0 else 0)
        if turn % 3 == 0:
            pair.victim.ask("clock", 0)
    assert [pair.check(batch_id) for batch_id in batch_ids] == ["completed"] * len(batch_ids)
    for server in servers:
        server.ask("clock", 0)


def test_a_clock_ahead_lets_nobody_take_what_is_held(pair: Pair) -> None:
    """A server whose clock is an hour ahead leaves the lines of one that works to it."""
    pair.let_survivor_work(False)
    pair.survivor.ask("patience", 200)  # ten seconds of beats, were they counted in time it would be 3,600
    pair.survivor.ask("clock", 3600)
    time.sleep(0.2)
    pair.survivor.ask("sites")
    assert pair.check(pair.start()) == "completed"
    evicted = [site for site in pair.survivor.ask("sites") if site.startswith("db DELETE FROM processes")]
    pair.survivor.ask("clock", 0)
    pair.survivor.ask("patience", 4)
    assert not evicted


@pytest.mark.first(1)
@pytest.mark.parametrize("where", ["db UPDATE batches SET status", "disk replace publish", "db COMMITTED after DELETE"])
def test_a_stop_in_the_middle_of_an_expiry(pair: Pair, where: str) -> None:
    """A server whose clock jumps by a day ends the batch; who takes over with the right clock ends it no other way."""

    def expired(pair: Pair) -> str:
        batch_id = pair.start()
        pair.victim.api.wait(batch_id, "in_progress")
        pair.victim.ask("clock", 25 * 3600)
        return batch_id

    pair.let_survivor_work(False)
    pair.victim.ask("delay", 0.05)
    try:
        pair.victim.ask("sites")
        pair.check(expired(pair))
        pair.victim.ask("clock", 0)
        site = next(site for site in pair.victim.ask("sites") if site.startswith(where))
        assert stop(pair, site, 2 if "replace" in where else 1, expired) in ("expired", "completed", "locked", "missed")
    finally:
        pair.victim.ask("clock", 0)
        pair.victim.ask("delay", 0.0)


def pause_between_transactions(pair: Pair) -> None:
    """Stop the victim right behind a beat: within a transaction it would keep the survivor from writing."""
    found: list[str] = []

    def has_beaten() -> bool:
        found[:] = [site for site in pair.victim.ask("sites") if site.startswith("db COMMITTED after UPDATE processes")]
        return bool(found)

    assert becomes(has_beaten, 60)
    pair.victim.ask("arm", found[0], 1)
    assert becomes(lambda: pair.victim.is_stopped, 60)


def test_a_stop_while_a_response_is_generated(pair: Pair) -> None:
    """Others end it as failed; the server that goes on does not write over that, and tells the same."""
    pair.victim.ask("delay", 3.0)
    try:
        body = {"model": "tiny", "input": "x", "background": True}
        path = f"/v1/responses/{pair.victim.post('/v1/responses', body).json()['id']}"
        pause_between_transactions(pair)
        assert becomes(lambda: pair.survivor.get(path).json()["status"] == "failed", 60)
    finally:
        pair.victim.go_on()
        pair.victim.ask("delay", 0.0)
    assert becomes(lambda: pair.victim.get(path).json()["status"] == "failed", 60)
    time.sleep(0.3)
    assert [server.get(path).json()["status"] for server in (pair.victim, pair.survivor)] == ["failed", "failed"]


def test_a_stop_while_a_file_in_use_is_deleted(pair: Pair) -> None:
    """Its batch, which the other server runs, has what it needs; the file is gone in the end."""
    pair.let_survivor_work(True)
    pair.survivor.ask("delay", 0.02)
    uploaded = pair.survivor.api.upload(jsonl(*(line(each) for each in IDS))).json()["id"]
    body = {"input_file_id": uploaded, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch_id = str(pair.survivor.post("/v1/batches", body).json()["id"])
    pair.survivor.api.wait(batch_id, "in_progress", *ENDED)
    path = f"{pair.victim.base}/v1/files/{uploaded}"
    with ThreadPoolExecutor(1) as pool:
        pair.victim.ask("arm", "disk unlink remove", 1)
        deleting = pool.submit(pair.victim.http.delete, path, timeout=60)
        becomes(lambda: deleting.done() or pair.victim.is_stopped, 2.0)
        time.sleep(0.3)
        pair.victim.go_on()
        assert deleting.result(60).status_code == 200
    pair.victim.ask("disarm")
    pair.survivor.ask("delay", 0.0)
    assert pair.check(batch_id) == "completed"
    assert pair.survivor.get(f"/v1/files/{uploaded}").status_code == 404
