"""One error at a time at each call to the disk and the database: a batch ends as it would have, once the error is over.

`make test-all` takes every kind of call and every error.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail_server.batches import backoff, lifecycle, processes, runner, service, writer
from dovetail_server.schema.batches import BatchError
from dovetail_server.storage.disk import PASSING
from dovetail_server.supervision import supervisor

from .conftest import Api, Harness, jsonl, line
from .steps import Steps, watch_database, watched_disk

LIMIT_S = 30
IDS = [f"id-{i}" for i in range(6)]
DISK = [OSError(number, os.strerror(number)) for number in (errno.EMFILE, errno.EIO, errno.ENOSPC)]
DATABASE = [
    sqlite3.OperationalError("database is locked"),
    sqlite3.IntegrityError("constraint failed"),
    sqlite3.OperationalError("database or disk is full"),
    sqlite3.OperationalError("disk I/O error"),
    sqlite3.DatabaseError("database disk image is malformed"),
]
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def steps() -> Iterator[Steps]:
    found = Steps()
    with watched_disk(found):
        yield found


@pytest.fixture(scope="module")
def api(folder: Path, tmp_path_factory: pytest.TempPathFactory, steps: Steps) -> Iterator[Api]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "RETRY_S", 0.05)
        patch.setattr(backoff, "FIRST_S", 0.02)
        patch.setattr(backoff, "LONGEST_S", 0.1)
        patch.setattr(processes, "BEAT_S", 0.2)
        patch.setattr(service, "SWEEP_S", 0.5)
        patch.setattr(runner, "POLL_S", 0.1)
        patch.setattr(runner, "LOST_S", 0.3)
        patch.setattr(supervisor, "MAX_DELAY_S", 0.1)
        patch.setattr(supervisor, "STABLE_S", 0.3)
        running = Harness(folder, file_storage_path=tmp_path_factory.mktemp("storage"), min_free_disk_bytes=0)
        assert running.get("/v1/files").status_code == 200
        watch_database(running.state.storage._service.database.engine, steps)
        yield Api(running)
        running.close()


def patiently(send: Callable[[], Any]) -> Any:
    """What a client does: try again where the server says that it cannot now."""
    deadline = time.monotonic() + LIMIT_S
    while (reply := send()).status_code >= 500:
        assert time.monotonic() < deadline, reply.text
        time.sleep(0.02)
    assert reply.status_code == 200, reply.text
    return reply.json()


def run_batch(api: Api) -> dict[str, Any]:
    uploaded = patiently(lambda: api.upload(jsonl(*(line(each) for each in IDS))))
    body = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch_id = patiently(lambda: api.harness.post("/v1/batches", body))["id"]
    deadline = time.monotonic() + LIMIT_S
    while (batch := patiently(lambda: api.harness.get(f"/v1/batches/{batch_id}")))["status"] not in ENDED:
        assert time.monotonic() < deadline, (batch, api.harness.get("/readyz").text)
        time.sleep(0.01)
    found: dict[str, Any] = batch
    return found


def failing(steps: Steps, site: str, error: Exception, times: int) -> Callable[[str], None]:
    """Raise, and arm again until it was raised so often."""

    def act(_: str) -> None:
        if times > 1:
            steps.arm(site, failing(steps, site, error, times - 1))
        raise error

    return act


def check(api: Api, batch: dict[str, Any]) -> None:
    assert batch["status"] == "completed"
    outputs, errors = api.results(batch)
    assert [each["custom_id"] for each in outputs] == IDS
    assert not errors
    assert batch["request_counts"] == {"total": len(IDS), "completed": len(IDS), "failed": 0}


def sites_of(api: Api, steps: Steps) -> list[str]:
    steps.seen.clear()
    check(api, run_batch(api))
    time.sleep(1.0)  # the sweep and the beat, too
    return sorted(steps.seen)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_one_error_at_every_call_costs_time_and_nothing_else(api: Api, steps: Steps) -> None:
    """EMFILE, EIO, ENOSPC, a locked, full or broken database, before a commit and after it: each id once, in order."""
    turns = {"disk": itertools.cycle(DISK), "db": itertools.cycle(DATABASE)}
    num = 0
    for site in sites_of(api, steps):
        kind = site.split()[0]
        # Each error, and one after the other three times in a row.
        cases = [*((error, 1) for error in (DISK if kind == "disk" else DATABASE)), (next(turns[kind]), 3)]
        for error, times in cases:
            steps.arm(site, failing(steps, site, error, times))
            try:
                check(api, run_batch(api))
            except AssertionError as failure:
                raise AssertionError(f"{error!r}, {times} times, at {site}: {failure}") from None
            finally:
                steps.disarm()
            num += 1
    print(f"{num} errors")
    api.harness.eventually(lambda: api.harness.get("/readyz").status_code == 200)
    storage = Path(api.harness.settings.file_storage_path)
    api.harness.eventually(lambda: not list((storage / "batches").iterdir()))


@pytest.mark.parametrize("error", [DISK[0], DISK[1]], ids=["EMFILE", "EIO"])
def test_an_error_that_lasts_pauses_visibly(api: Api, steps: Steps, error: OSError) -> None:
    """While no request can be read, readiness says so; then the batch goes on."""
    site = "disk open read_at"
    steps.arm(site, failing(steps, site, error, 8))
    uploaded = api.upload(jsonl(*(line(each) for each in IDS))).json()
    body = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch_id = api.harness.post("/v1/batches", body).json()["id"]
    api.harness.eventually(lambda: "requests cannot be read" in api.harness.get("/readyz").text)
    check(api, api.wait(batch_id))
    api.harness.eventually(lambda: api.harness.get("/readyz").status_code == 200)


def test_a_request_that_can_never_be_read_becomes_an_error_line(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of a damaged file is told as such; its neighbours are answered."""
    real = runner.read_at
    bad: list[int] = []

    def read_at(path: Path, offset: int, length: int) -> bytes:
        if not bad:
            bad.append(offset)
        if offset == bad[0]:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, offset, length)

    monkeypatch.setattr(runner, "read_at", read_at)
    outputs, errors = api.results(run_batch(api))
    assert len(outputs) == len(IDS) - 1
    assert errors[0]["response"]["status_code"] == 500
    assert errors[0]["response"]["body"]["error"]["code"] == "request_unreadable"


def test_a_batch_whose_folder_is_gone_ends(api: Api) -> None:
    """Somebody removed the input of a running batch: its lines are told as unreadable, none is waited for."""
    before = sum(api.harness.state.tasks.crashes.values())
    api.harness.engine.hold.clear()
    batch_id = api.start(*(line(each) for each in IDS))
    api.wait(batch_id, "in_progress")
    api.harness.eventually(lambda: len(api.harness.engine.live) == len(IDS))
    for path in (Path(api.harness.settings.file_storage_path) / "batches" / batch_id).iterdir():
        path.unlink()
    path.parent.rmdir()
    api.harness.engine.hold.set()
    check(api, api.wait(batch_id))  # what was read already is answered, and kept
    assert sum(api.harness.state.tasks.crashes.values()) - before < 100


def test_a_writer_that_dies_goes_on_where_it_was(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody foresaw ends the task: it is counted, told, and the same results are saved by the next."""
    real, left = writer.append, [3]

    def append(path: Path, pieces: list[bytes], at: int) -> int:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("unforeseen")
        return real(path, pieces, at)

    monkeypatch.setattr(writer, "append", append)
    before = api.harness.state.tasks.crashes["batch writer"]
    check(api, run_batch(api))
    assert api.harness.state.tasks.crashes["batch writer"] == before + 3
    assert 'dovetail_background_task_deaths_total{task="batch writer"}' in api.harness.get("/metrics").text


def test_a_stuck_writer_does_not_keep_the_server_from_ending(
    make_harness: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage is closed within its limit, and the next server runs what was not saved."""
    from dovetail_server.batches import lazy

    monkeypatch.setattr(lazy, "CLOSE_S", 0.5)
    monkeypatch.setattr(supervisor, "END_S", 0.2)
    first = Api(make_harness(file_storage_path=tmp_path, min_free_disk_bytes=0, drain_timeout=0.1))

    async def hang(*_: Any) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    with monkeypatch.context() as patch:
        patch.setattr(writer.ResultWriter, "_save", hang)
        batch_id = first.start(*(line(each) for each in IDS))
        first.wait(batch_id, "in_progress")
        saving = first.harness.state.storage._service.writer
        first.harness.eventually(lambda: bool(saving._group))
        first.harness.loop.call_soon_threadsafe(first.harness.server._begin_drain)
        first.harness.eventually(lambda: not first.harness.thread.is_alive())
    second = Api(make_harness(file_storage_path=tmp_path, min_free_disk_bytes=0))
    check(second, second.wait(batch_id))


def test_an_input_that_stays_unreadable_fails_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its last read; until then it is tried again, and faults that pass by themselves do not count."""
    monkeypatch.setattr(backoff, "FIRST_S", 0.0)
    codes = [min(PASSING), *[errno.EIO] * lifecycle.MAX_READS]
    failed: list[tuple[int, BatchError]] = []

    async def lease(batch_id: str) -> Any:
        return SimpleNamespace(batch_id=batch_id)

    async def release_lease(lease: Any) -> None:
        pass

    async def validate(row: Any, lease: Any) -> None:
        raise OSError(codes.pop(0), "broken")

    async def fail(lease: Any, errors: list[BatchError]) -> None:
        failed.extend((len(codes), error) for error in errors)

    async def main() -> None:
        tasks = SimpleNamespace(start=lambda name, work: asyncio.create_task(work))
        one: Any = lifecycle.BatchLifecycle(
            SimpleNamespace(tasks=tasks, has_started=True),  # type: ignore[arg-type]
            SimpleNamespace(lease=lease, release_lease=release_lease),  # type: ignore[arg-type]
            SimpleNamespace(validate=validate, fail=fail),  # type: ignore[arg-type]
            SimpleNamespace(wake=lambda: None),  # type: ignore[arg-type]
        )
        while codes:
            await one.advance([{"id": "batch_1", "status": "validating"}])
            await asyncio.gather(*one._tasks.values())
        assert one.problem is None

    asyncio.run(main())
    assert [(left, error.code) for left, error in failed] == [(0, "file_unreadable")]
