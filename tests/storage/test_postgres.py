"""Files and batches on PostgreSQL: a real server from the distribution's package, for these tests alone."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa
from gateway_process import Served
from seeing_server import SeeingHarness, write_seeing_model

from .conftest import Api, line
from .processes import Killable
from .test_pauses import Pair, pair_of, stop


def binary(name: str) -> str | None:
    """Find one of PostgreSQL's programs, which distributions keep out of the search path."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(found[-1]) if found else None)


def unprivileged() -> dict[str, Any]:
    """PostgreSQL refuses to run as root; return how to run it as somebody else."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            return {"user": pwd.getpwnam(name).pw_uid, "cwd": "/", "extra_groups": []}
        except KeyError:
            continue
    pytest.skip("PostgreSQL does not run as root, and there is no user `postgres` or `nobody`")


class Postgres:
    """A server that listens on a socket file only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.options = unprivileged()
        if "user" in self.options:
            os.chown(folder, self.options["user"], -1)
        self.url = f"postgresql+psycopg://postgres@/postgres?host={folder}"
        self.run("initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8")
        self.start()

    def run(self, name: str, *arguments: str) -> None:
        path = binary(name)
        assert path is not None
        subprocess.run([path, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=60, **self.options)

    def start(self) -> None:
        settings = f"-k {self.folder} -c listen_addresses='' -c fsync=off -c max_connections=60"
        log = str(self.folder / "log")
        self.run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-l", log, "-o", settings, "start")

    def stop(self) -> None:
        self.run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", "immediate", "stop")


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    if binary("initdb") is None or binary("pg_ctl") is None:
        pytest.skip("no PostgreSQL server here; install the distribution's package `postgresql`")
    pytest.importorskip("psycopg", reason="psycopg is not installed; pip install 'dovetail-llm[postgres]'")
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # socket paths must be short
    server = None
    try:
        server = Postgres(folder)
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def test_the_whole_way(postgres: Postgres, make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """Upload, run, list, cancel and delete work as on SQLite, and no SQLite file appears."""
    options = {"file_storage_path": tmp_path, "database_url": postgres.url, "min_free_disk_bytes": 0}
    api = Api(make_harness(**options))
    batch = api.run(line("a"), line("b", n=0), line("c"), metadata={"k": "v"})
    outputs, errors = api.results(batch)
    assert ([o["custom_id"] for o in outputs], [e["custom_id"] for e in errors]) == (["a", "c"], ["b"])
    assert batch["metadata"] == {"k": "v"}
    assert batch["usage"]["total_tokens"] > 0
    assert api.harness.get("/v1/batches").json()["first_id"] == batch["id"]
    assert api.run(line("a"), line("a"))["errors"]["data"][0]["code"] == "duplicate_custom_id"
    api.harness.engine.delay_s = 0.05
    batch_id = api.start(*(line(str(i)) for i in range(200)))
    api.wait(batch_id, "in_progress")
    assert api.harness.post(f"/v1/batches/{batch_id}/cancel").json()["status"] == "cancelling"
    assert api.wait(batch_id)["status"] == "cancelled"
    assert not (tmp_path / "dovetail.db").exists()
    assert "postgres@" not in api.harness.get("/get_server_info").text


def test_conversations(postgres: Postgres, make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """Turns, pages, limits and deletion are as on SQLite; two servers see one conversation, and lose no turn."""
    options = {"file_storage_path": tmp_path, "database_url": postgres.url, "min_free_disk_bytes": 0}
    first, second = (make_harness(**options, max_stored_responses=3, context_len=8192) for _ in range(2))
    said = {"type": "message", "role": "user", "content": "remember 7", "id": "msg_mine"}
    path = f"/v1/conversations/{first.post('/v1/conversations', {'items': [said, said]}).json()['id']}"
    body = {"model": "tiny", "conversation": path.rpartition("/")[2], "store": False}

    def turn(number: int) -> int:
        return int((first, second)[number % 2].post("/v1/responses", {**body, "input": f"q{number}"}).status_code)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(turn, range(8))) == {200}
    page = second.get(f"{path}/items", params={"order": "asc", "limit": 100}).json()["data"]
    texts = [item["content"][0]["text"] for item in page]
    assert texts[:2] == ["remember 7"] * 2
    assert len({item["id"] for item in page}) == len(page) == 18
    assert sorted(texts[2::2]) == [f"q{number}" for number in range(8)]
    assert set(texts[3::2]) == {"Hello, world"}
    rest = first.get(f"{path}/items", params={"order": "asc", "limit": 2, "after": page[15]["id"]}).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == ([page[16]["id"], page[17]["id"]], False)
    assert first.http.delete(f"{first.base}{path}/items/msg_mine", timeout=60).status_code == 200
    assert second.get(f"{path}/items/msg_mine").status_code == 404
    assert second.post(path, {"metadata": {"k": "v"}}).json()["metadata"] == {"k": "v"}
    for _ in range(3):
        second.post("/v1/conversations", {})
    assert first.get(path).status_code == 404
    assert not (tmp_path / "dovetail.db").exists()


def test_an_image_of_two_servers(postgres: Postgres, tmp_path: Path) -> None:
    """While one server deletes what had an image, another stores it again: nobody finds it gone, and none is left."""
    options = {"file_storage_path": tmp_path, "database_url": postgres.url, "min_free_disk_bytes": 0}
    both = [SeeingHarness(write_seeing_model(tmp_path / name), **options) for name in "ab"]
    shown = {"type": "input_image", "image_url": f"data:image/png;base64,{'A' * 3000}", "detail": "auto"}

    def come_and_go(number: int) -> Any:
        server = both[number % 2]
        reply = server.post("/v1/conversations", {"items": [{"role": "user", "content": [shown]}]})
        assert reply.status_code == 200, reply.text
        made = reply.json()["id"]
        found = both[1 - number % 2].get(f"/v1/conversations/{made}/items").json()["data"][0]["content"]
        assert server.http.delete(f"{server.base}/v1/conversations/{made}", timeout=60).status_code == 200
        return found

    try:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(come_and_go, range(40))) == [[shown]] * 40
    finally:
        for server in both:
            server.close()
    engine = sa.create_engine(postgres.url)
    with engine.connect() as db:
        counts = [db.scalar(sa.text(f"SELECT count(*) FROM {name}")) for name in ("stored_images", "image_uses")]
    engine.dispose()
    assert counts == [0, 0]


def test_two_servers_share_a_batch_and_one_is_killed(postgres: Postgres, folder: Path, tmp_path: Path) -> None:
    """Both run lines; the death of one loses and repeats nothing."""
    settings = {"file_storage_path": tmp_path, "database_url": postgres.url, "delay_s": 0.02, "max_batch_requests": 8}
    with Killable(folder, **settings) as survivor:
        with Killable(folder, **settings) as victim:
            batch_id = survivor.api.start(*(line(str(i)) for i in range(400)))
            parts = tmp_path / "batches" / batch_id
            deadline = time.monotonic() + 60
            while len(list(parts.glob("*.seg"))) < 2 or victim.api.batch(batch_id)["request_counts"]["completed"] < 40:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert victim.api.batch(batch_id)["status"] == "in_progress"
        batch = survivor.api.wait(batch_id, timeout=120)
        assert batch["request_counts"] == {"total": 400, "completed": 400, "failed": 0}
        outputs, errors = survivor.api.results(batch)
        assert [o["custom_id"] for o in outputs] == [str(i) for i in range(400)]
        assert not errors


def test_connections_that_break_cost_no_line(
    postgres: Postgres, make_harness: Callable[..., Any], tmp_path: Path
) -> None:
    """Every connection is ended again and again, in the middle of statements or commits: each id once, in order."""
    import psycopg

    options = {"file_storage_path": tmp_path, "database_url": postgres.url, "min_free_disk_bytes": 0}
    api = Api(make_harness(**options, max_batch_requests=8))
    api.harness.engine.delay_s = 0.002
    ids = [str(i) for i in range(100)]
    batch_id = api.start(*(line(each) for each in ids))
    everybody = (
        "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid() and usename = user"
    )
    num = 0
    with psycopg.connect(f"host={postgres.folder} user=postgres dbname=postgres", autocommit=True) as admin:
        for _ in range(20):
            num += len(admin.execute(everybody).fetchall())
            time.sleep(0.05)
    assert num > 3
    batch = api.wait(batch_id)
    assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
    assert [each["custom_id"] for each in api.results(batch)[0]] == ids


@pytest.mark.first(1)
@pytest.mark.parametrize("where", ["disk replace publish", "db COMMITTED after DELETE FROM batch_lines"])
def test_a_stop_in_the_end_of_a_batch(where: str, postgres: Postgres, folder: Path, tmp_path: Path) -> None:
    """As with SQLite: before the files have their names, and after the transaction counted."""
    for pair in pair_of(folder, tmp_path, database_url=postgres.url):
        pair.check(pair.start())
        site = next(site for site in pair.victim.ask("sites") if site.startswith(where))
        assert stop(pair, site, 2 if "replace" in where else 1, Pair.start, patience=60.0) == "completed"


def test_responses_are_shared_by_servers(postgres: Postgres, make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """What one server stored another continues, cancels only where it ran, deletes, and gives up in order of age."""
    options = {"file_storage_path": tmp_path, "database_url": postgres.url, "max_stored_responses": 6}
    one, two = make_harness(**options), make_harness(**options)
    body = {"model": "tiny", "input": "first of all"}
    first = one.post("/v1/responses", body).json()
    second = two.post("/v1/responses", {**body, "input": "and?", "previous_response_id": first["id"]}).json()
    assert "first of all" in two.tokenizer.decode(two.engine.submits[-1].prompt_ids, skip_special_tokens=False)
    assert one.get(f"/v1/responses/{second['id']}").json() == second
    one.engine.hold.clear()
    slow = one.post("/v1/responses", {**body, "background": True}).json()
    assert two.post(f"/v1/responses/{slow['id']}/cancel").json()["error"]["code"] == "runs_elsewhere"
    assert one.post(f"/v1/responses/{slow['id']}/cancel").json()["status"] == "cancelled"
    assert two.get(f"/v1/responses/{slow['id']}").json()["status"] == "cancelled"
    assert two.http.delete(f"{two.base}/v1/responses/{second['id']}").status_code == 200
    assert one.get(f"/v1/responses/{second['id']}").status_code == 404
    for _ in range(8):
        assert two.post("/v1/responses", body).status_code == 200
    two.eventually(lambda: two.get(f"/v1/responses/{first['id']}").status_code == 404)


def test_chat_completions_are_shared_by_servers(
    postgres: Postgres, make_harness: Callable[..., Any], tmp_path: Path
) -> None:
    """What one server stored another lists by metadata, changes, deletes, and gives up in order of age."""
    options = {"file_storage_path": tmp_path, "database_url": postgres.url, "max_stored_responses": 3}
    one, two = make_harness(**options), make_harness(**options)
    body = {"messages": [{"role": "user", "content": "hi"}], "store": True}
    url = "/v1/chat/completions"
    ids = [one.post(url, {**body, "metadata": {"n é": str(at)}}).json()["id"] for at in range(3)]
    assert [item["id"] for item in two.get(f"{url}?metadata[n é]=1").json()["data"]] == [ids[1]]
    assert two.post(f"{url}/{ids[1]}", {"metadata": {"a": "b"}}).json()["metadata"] == {"a": "b"}
    assert one.get(f"{url}?metadata[n é]=1").json()["data"] == []
    assert two.http.delete(f"{two.base}{url}/{ids[2]}").status_code == 200
    newer = [two.post(url, body).json()["id"] for _ in range(2)]
    assert [item["id"] for item in one.get(url).json()["data"]] == [ids[1], *newer]


def test_an_unreachable_database_leaves_responses_answered(
    postgres: Postgres, make_harness: Callable[..., Any], tmp_path: Path
) -> None:
    """Who asks for storing gets a 503 or, too late for that, `store: false`; who does not is answered."""
    server = make_harness(file_storage_path=tmp_path, database_url=postgres.url)
    body = {"model": "tiny", "input": "hi"}
    first = server.post("/v1/responses", body).json()
    assert first["store"] is True
    postgres.stop()
    try:
        found = server.post("/v1/responses", body)
        assert (found.status_code, found.json()["store"]) == (200, False)
        reply = server.post("/v1/responses", {**body, "previous_response_id": first["id"]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable")
        assert server.get(f"/v1/responses/{first['id']}").status_code == 503
        assert server.post("/v1/responses", {**body, "background": True}).status_code == 503
    finally:
        postgres.start()
    assert server.get(f"/v1/responses/{first['id']}").json() == first


def test_an_unreachable_database_is_503_until_it_is_back(
    postgres: Postgres, make_harness: Callable[..., Any], tmp_path: Path
) -> None:
    """Nothing that was accepted is lost; readiness tells of it."""
    options = {"file_storage_path": tmp_path, "database_url": postgres.url, "min_free_disk_bytes": 0}
    api = Api(make_harness(**options))
    api.harness.engine.delay_s = 0.01
    batch_id = api.start(*(line(str(i)) for i in range(100)))
    api.wait(batch_id, "in_progress")
    postgres.stop()
    try:
        reply = api.harness.get("/v1/files")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable")
        assert "postgres@" not in reply.text
        api.harness.eventually(lambda: api.harness.get("/readyz").status_code == 503)
    finally:
        postgres.start()
    batch = api.wait(batch_id)
    assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
    assert [o["custom_id"] for o in api.results(batch)[0]] == [str(i) for i in range(100)]


@pytest.mark.parametrize("url", ["mysql://x", "postgresql://x@y/z", "sqlite:///x.db"])
def test_other_databases_are_refused(url: str, tmp_path: Path) -> None:
    """The message says what is possible and does not repeat a password."""
    from dovetail.contracts.errors import ConfigError
    from dovetail_server.storage.database import database_url

    with pytest.raises(ConfigError, match="give postgresql") as caught:
        database_url(url, tmp_path)
    assert "x" not in str(caught.value).split("'")[1]


@pytest.mark.full
def test_workers_behind_one_address_share_it(postgres: Postgres, tmp_path: Path) -> None:
    """`--data-parallel-size 2`: a batch survives `kill -9` of a worker, each id once; all of them know every file."""
    pytest.importorskip("smg", reason="needs dovetail-llm[gateway]")
    flags = ["--database-url", postgres.url, "--file-storage-path", str(tmp_path / "files"), "--device", "cpu"]
    running = Served(tmp_path, "serve", "--data-parallel-size", "2", *flags, "--max-batch-requests", "4", key=None)
    try:
        running.wait()
        ids = [f"n{i}" for i in range(200)]
        url = "/v1/completions"
        body = {"prompt": "The capital of", "max_tokens": 8, "ignore_eos": True}
        rows = [{"custom_id": each, "method": "POST", "url": url, "body": body} for each in ids]
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        upload = running.session.post(
            f"{running.base}/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}, timeout=60
        )
        wish = {"input_file_id": upload.json()["id"], "endpoint": url, "completion_window": "24h"}
        batch = running.post("/v1/batches", wish).json()["id"]

        def counts() -> dict[str, int]:
            found: dict[str, int] = running.get(f"/v1/batches/{batch}").json()["request_counts"]
            return found

        running.until(lambda: counts()["completed"] >= 40)
        os.kill(running.pids()[0], signal.SIGKILL)
        assert counts()["completed"] < len(ids)
        running.until(lambda: running.get(f"/v1/batches/{batch}").json()["status"] == "completed", 120)
        assert counts() == {"total": 200, "completed": 200, "failed": 0}
        output = running.get(f"/v1/batches/{batch}").json()["output_file_id"]
        found = running.get(f"/v1/files/{output}/content").text.splitlines()
        assert [json.loads(row)["custom_id"] for row in found] == ids
        running.until(lambda: all(worker["ready"] for worker in running.workers()))
        for worker in running.workers():  # each of them, not the one that the relay asks
            assert requests.get(f"{worker['url']}/v1/files/{output}/content", timeout=60).text.splitlines() == found
    finally:
        running.close()
    assert not (tmp_path / "files" / "dovetail.db").exists()
