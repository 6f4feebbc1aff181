"""What survives: kill -9 at any moment, a full disk, a locked database, an ending server, an engine that dies."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from dovetail_server.storage import disk

from .conftest import Api, Harness, line
from .processes import Killable

NUM_LINES = 240


def ids_of(api: Api, batch: dict[str, Any]) -> list[str]:
    outputs, errors = api.results(batch)
    return [item["custom_id"] for item in outputs + errors]


def test_kill_9_again_and_again_loses_and_repeats_nothing(folder: Path, tmp_path: Path) -> None:
    """Every `custom_id` stands exactly once in the output, after three deaths in the middle of the work."""
    settings = {"file_storage_path": tmp_path, "delay_s": 0.01, "max_batch_requests": 16}
    with Killable(folder, **settings) as server:
        batch_id = server.api.start(*(line(f"id-{i}") for i in range(NUM_LINES)))
    done = []
    for _ in range(2):
        with Killable(folder, **settings) as server:
            before = server.api.batch(batch_id)["request_counts"]["completed"]
            deadline = time.monotonic() + 60
            while server.api.batch(batch_id)["request_counts"]["completed"] < min(before + 60, NUM_LINES - 20):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            done.append(before)
    assert done == sorted(done), "what was counted as done stays done"
    assert done[-1] > done[0]
    with Killable(folder, **settings | {"delay_s": 0.0}) as server:
        batch = server.api.wait(batch_id, timeout=60)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        assert ids_of(server.api, batch) == [f"id-{i}" for i in range(NUM_LINES)]
        assert not list((tmp_path / "batches").iterdir())
        assert not list((tmp_path / "tmp").iterdir())


def test_lines_that_many_servers_died_with_are_run_one_at_a_time(
    make_harness: Callable[..., Any], tmp_path: Path
) -> None:
    """Which of them it was shows only so; the others, also of another batch, get done, and pay no attempt for it."""
    options = {"file_storage_path": tmp_path, "min_free_disk_bytes": 0, "max_batch_requests": 8}
    first = Api(make_harness(**options))
    first.harness.engine.hold.clear()
    ids = [first.start(*(line(f"{n}-{i}") for i in range(6))) for n in range(2)]
    first.harness.eventually(lambda: len(first.harness.engine.submits) == 8)
    first.harness.close()
    with closing(sqlite3.connect(tmp_path / "dovetail.db")) as database:
        database.execute("UPDATE batch_lines SET attempt = CASE WHEN line_no < 4 THEN 15 ELSE 0 END")
        database.commit()

        second = Api(make_harness(**options))
        second.harness.engine.delay_s = 0.02
        second.harness.get("/v1/files")
        most = Counter[int]()
        query = "SELECT attempt > 4, count(*) FROM batch_lines WHERE state = 'leased' GROUP BY 1"
        deadline = time.monotonic() + 60
        while any(second.batch(each)["status"] not in ("completed", "failed") for each in ids):
            assert time.monotonic() < deadline
            leased = dict(database.execute(query).fetchall())
            most[1] = max(most[1], leased.get(1, 0))
            assert not leased.get(1, 0) or leased[1] + leased.get(0, 0) == 1, "beside others"
        worst = database.execute("SELECT max(attempt) FROM batch_lines").fetchone()
    assert most[1] == 1
    assert worst in ((16,), (None,)), "rows of batches that ended are removed"
    for each in ids:
        assert second.batch(each)["request_counts"] == {"total": 6, "completed": 6, "failed": 0}


def test_a_server_that_ends_hands_its_batch_to_the_next(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """A clean end gives leases back at once, also where lines are cut off."""
    options = {"file_storage_path": tmp_path, "min_free_disk_bytes": 0, "drain_timeout": 0.1}
    first = Api(make_harness(**options))
    first.harness.engine.delay_s = 0.05
    batch_id = first.start(*(line(str(i)) for i in range(100)))
    first.wait(batch_id, "in_progress")
    first.harness.eventually(lambda: len(first.harness.engine.live) > 3)
    first.harness.loop.call_soon_threadsafe(first.harness.server._begin_drain)
    first.harness.thread.join(60)
    second = Api(make_harness(**options))
    second.harness.get("/v1/files")
    batch = second.wait(batch_id)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
    assert ids_of(second, batch) == [str(i) for i in range(100)]


def test_a_full_disk_pauses_a_batch(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fails: readiness tells of it, and the batch goes on when there is room."""
    from dovetail_server.batches import writer

    real, is_full = disk.append, True

    def append(path: Path, pieces: list[bytes], at: int) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, pieces, at)

    monkeypatch.setattr(writer, "append", append)
    monkeypatch.setattr(writer, "RETRY_S", 0.05)
    batch_id = api.start(*(line(str(i)) for i in range(50)))
    api.harness.eventually(lambda: api.harness.get("/readyz").status_code == 503)
    assert "No space" in api.harness.get("/readyz").text
    assert api.batch(batch_id)["request_counts"]["completed"] == 0
    is_full = False
    assert ids_of(api, api.wait(batch_id)) == [str(i) for i in range(50)]
    assert api.harness.get("/readyz").status_code == 200


def test_too_little_free_space_pauses_a_batch(api: Api) -> None:
    """Below the floor no line begins; above it the batch goes on."""
    api.upload(b"")
    settings = api.harness.settings
    uploaded = api.upload(b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}')
    settings.min_free_disk_bytes = 1 << 50
    body = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch_id = api.harness.post("/v1/batches", body).json()["id"]
    api.harness.eventually(lambda: "min-free-disk-bytes" in api.harness.get("/readyz").text)
    assert not api.harness.engine.submits
    settings.min_free_disk_bytes = 0
    assert api.wait(batch_id)["request_counts"]["failed"] == 1


def test_too_many_open_files_are_503_and_pass(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload is told to come again; what the server does by itself is tried again soon, and it is ready then."""

    def full(*args: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("dovetail_server.batches.finalize.disk.names_in", full)  # the first sweep
        patch.setattr("dovetail_server.storage.upload.create", full)
        reply = api.upload(b"{}\n")
        api.harness.eventually(lambda: "Too many open files" in api.harness.get("/readyz").text)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable")
    assert reply.headers["retry-after"]
    api.harness.eventually(lambda: api.harness.get("/readyz").status_code == 200)
    assert api.upload(b"{}\n").status_code == 200


def test_a_locked_database_is_503_and_nothing_accepted_is_lost(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another holds the lock, writing is refused for later, readiness says so, and batches go on after it."""
    api.harness.engine.delay_s = 0.01
    batch_id = api.start(*(line(str(i)) for i in range(100)))
    api.wait(batch_id, "in_progress")
    service = api.harness.state.storage._service
    sa.event.listen(service.database.engine.sync_engine, "checkout", hurry)
    lock = sqlite3.connect(Path(api.harness.settings.file_storage_path) / "dovetail.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    try:
        reply = api.upload(b"{}")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "storage_unavailable"
        assert reply.headers["retry-after"]
        api.harness.eventually(lambda: "locked" in api.harness.get("/readyz").text)
        assert api.harness.get("/v1/files").status_code == 200, "reading goes on"
    finally:
        lock.execute("ROLLBACK")
        lock.close()
    assert ids_of(api, api.wait(batch_id)) == [str(i) for i in range(100)]
    api.harness.eventually(lambda: api.harness.get("/readyz").status_code == 200)


def hurry(connection: Any, record: object, proxy: object) -> None:
    connection.execute("PRAGMA busy_timeout=50").close()


def test_an_engine_that_dies_costs_no_line(api: Api) -> None:
    """Lines wait until there is an engine again."""
    api.harness.engine.delay_s = 0.002
    api.harness.engine.die_after = 200
    batch_id = api.start(*(line(str(i)) for i in range(60)))
    api.harness.eventually(lambda: api.harness.engine.dead is not None)
    time.sleep(0.2)
    assert api.batch(batch_id)["status"] == "in_progress"
    api.harness.reset()
    batch = api.wait(batch_id)
    assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
    assert ids_of(api, batch) == [str(i) for i in range(60)]


def test_faults_of_the_server_are_tried_again_and_then_told(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that fails for a reason of ours ends in the error file as a 500 without details."""
    from dovetail.messages import Finish
    from dovetail_server.batches import execute

    monkeypatch.setattr(execute, "BUSY_WAIT_S", 0.01)
    api.harness.engine.give_up = Finish("abort", None, "the parser broke")
    outputs, errors = api.results(api.run(line("a")))
    assert not outputs
    assert errors[0]["response"]["status_code"] == 500
    assert errors[0]["response"]["body"]["error"]["code"] == "request_failed"
    assert len(api.harness.engine.submits) == execute.MAX_FAULTS


def test_an_expired_batch_keeps_what_is_done(api: Api) -> None:
    """Past its window: `expired`, replies kept, the rest `batch_expired` in the error file."""
    api.harness.engine.delay_s = 0.02
    batch_id = api.start(*(line(str(i)) for i in range(300)))
    api.harness.eventually(lambda: api.batch(batch_id)["request_counts"]["completed"] > 0)

    async def age() -> None:
        from dovetail_server.storage.tables import batches

        async with api.harness.state.storage._service.database.write() as db:
            await db.execute(sa.update(batches).values(expires_at=int(time.time()) - 1))

    asyncio.run_coroutine_threadsafe(age(), api.harness.loop).result(60)
    batch = api.wait(batch_id)
    assert batch["status"] == "expired"
    assert batch["expired_at"]
    outputs, errors = api.results(batch)
    assert outputs
    assert {e["error"]["code"] for e in errors} == {"batch_expired"}
    assert sorted(int(x["custom_id"]) for x in outputs + errors) == list(range(300))


def test_a_slow_line_gets_a_time_limit(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """`request_timeout`, without a response."""
    from dovetail_server.batches import runner

    monkeypatch.setattr(runner, "LINE_TIMEOUT_S", 0.2)
    api.harness.engine.hold.clear()
    _, errors = api.results(api.run(line("a")))
    assert (errors[0]["response"], errors[0]["error"]["code"]) == (None, "request_timeout")


def test_uncommitted_bytes_are_cut_off(tmp_path: Path) -> None:
    """An append begins where the committed part ends, and a failed one leaves nothing behind."""
    segment = tmp_path / "x.seg"
    assert disk.append(segment, [b"one", b"two"], 0) == 6
    assert disk.append(segment, [b"three"], 3) == 8
    assert segment.read_bytes() == b"onethree"


def test_publishing_is_whole_or_not_at_all(tmp_path: Path) -> None:
    """A failure while writing leaves the old file and no temporary one."""
    target, temp = tmp_path / "f", tmp_path / "t"
    assert disk.write_whole(target, temp, [b"old"]) == 3

    def pieces() -> Any:
        yield b"new"
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        disk.write_whole(target, temp, pieces())
    assert target.read_bytes() == b"old"
    assert not temp.exists()


def test_two_servers_share_one_folder(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """Both run lines of one batch; together they run each once."""
    options = {"file_storage_path": tmp_path, "min_free_disk_bytes": 0, "max_batch_requests": 4}
    first, second = Api(make_harness(**options)), Api(make_harness(**options))
    for api in (first, second):
        api.harness.engine.delay_s = 0.005
        api.harness.get("/v1/files")
    batch_id = first.start(*(line(str(i)) for i in range(200)))
    batch = second.wait(batch_id)
    assert ids_of(second, batch) == [str(i) for i in range(200)]
    counts = [len(api.harness.engine.submits) for api in (first, second)]
    assert min(counts) > 0
    assert sum(counts) == 200


def test_a_server_runs_only_batches_for_its_model(folder: Path, tmp_path: Path) -> None:
    """A server of another model that shares the storage leaves the batch alone."""
    options = {"file_storage_path": tmp_path, "min_free_disk_bytes": 0}
    one = Harness(folder, served_model_name=["other"], **options)
    try:
        api = Api(one)
        one.engine.hold.clear()
        batch_id = api.start(line("a", model="other"))
        api.wait(batch_id, "in_progress")
        two = Harness(folder, **options)
        try:
            two.get("/v1/files")
            time.sleep(0.3)
            assert not two.engine.submits
        finally:
            two.close()
        one.engine.hold.set()
        assert api.wait(batch_id)["model"] == "other"
    finally:
        one.close()


def test_stored_responses_survive_kill_9(folder: Path, tmp_path: Path) -> None:
    """What was answered can be continued; what was being generated in the background is known to have failed."""
    settings = {"file_storage_path": tmp_path, "delay_s": 0.05}
    body = {"model": "tiny", "input": "remember me"}
    with Killable(folder, **settings) as server:
        kept = server.post("/v1/responses", body).json()
        lost = server.post("/v1/responses", {**body, "background": True}).json()
    with Killable(folder, **settings) as server:
        assert server.get(f"/v1/responses/{kept['id']}").json() == kept
        more = server.post("/v1/responses", {**body, "input": "so?", "previous_response_id": kept["id"]}).json()
        assert more["usage"]["input_tokens"] > kept["usage"]["input_tokens"] + kept["usage"]["output_tokens"]
        found = server.get(f"/v1/responses/{lost['id']}").json()
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")


def test_a_server_that_ends_says_so_of_its_background_responses(
    make_harness: Callable[..., Any], tmp_path: Path
) -> None:
    """A clean end leaves no response in progress."""
    first = make_harness(file_storage_path=tmp_path, drain_timeout=0.1)
    first.engine.delay_s = 0.2
    started = first.post("/v1/responses", {"model": "tiny", "input": "x", "background": True}).json()
    first.close()
    second = make_harness(file_storage_path=tmp_path)
    assert second.get(f"/v1/responses/{started['id']}").json()["status"] == "failed"


def test_tables_are_made_at_once_and_a_strangers_revision_is_refused(
    make_harness: Callable[..., Any], tmp_path: Path
) -> None:
    """A new database has the tables and the last revision, and one of a revision not known here says so."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from dovetail_server.storage.tables import metadata

    first = make_harness(file_storage_path=tmp_path)
    assert first.get("/v1/files").json()["data"] == []
    first.close()
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'dovetail.db'}")
    with engine.begin() as connection:
        context = MigrationContext.configure(connection)
        assert (compare_metadata(context, metadata), context.get_current_revision()) == ([], "0006")
        connection.exec_driver_sql("update alembic_version set version_num = '0003'")
    engine.dispose()
    reply = make_harness(file_storage_path=tmp_path).get("/v1/files")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable")
    assert "another version made the database" in reply.json()["error"]["message"]
