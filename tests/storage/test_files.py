"""Files over HTTP: what comes back, what is refused, and that no client decides a path."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from .conftest import Api, jsonl, line

HOUR = 3600


def test_a_file_comes_back_byte_for_byte(api: Api) -> None:
    """Upload, describe, read, delete; afterwards it is gone from the disk too."""
    content = os.urandom(3_000_001)
    file = api.upload(content, "data.bin", purpose="user_data").json()
    assert file["id"].startswith("file-")
    assert (file["object"], file["bytes"], file["purpose"]) == ("file", len(content), "user_data")
    assert (file["filename"], file["status"]) == ("data.bin", "processed")
    assert "expires_at" not in file
    path = f"/v1/files/{file['id']}"
    assert api.harness.get(path).json() == file
    reply = api.harness.get(path + "/content")
    assert reply.content == content
    assert reply.headers["x-content-type-options"] == "nosniff"
    gone = api.harness.http.delete(api.harness.base + path, timeout=60)
    assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
    for again in (path, path + "/content"):
        assert api.harness.get(again).status_code == 404
    storage = Path(api.harness.settings.file_storage_path)
    assert not list((storage / "files").iterdir())
    assert not list((storage / "tmp").iterdir())


def test_an_empty_file_is_a_file(shared: Api) -> None:
    """Zero bytes are kept; a batch of them fails later."""
    file = shared.upload(b"").json()
    assert file["bytes"] == 0
    assert shared.harness.get(f"/v1/files/{file['id']}/content").content == b""


def test_a_server_that_sees_no_file_writes_nothing(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """The folder appears with the first request that needs it."""
    harness = make_harness(file_storage_path=tmp_path / "never")
    assert harness.get("/v1/models").status_code == 200
    assert not (tmp_path / "never").exists()
    assert harness.get("/v1/files").json()["data"] == []
    assert (tmp_path / "never" / "dovetail.db").exists()
    assert (tmp_path / "never").stat().st_mode & 0o077 == 0


def test_listing_pages(api: Api) -> None:
    """Order, purpose, limit and cursor."""
    ids = [api.upload(b"{}", purpose="batch").json()["id"] for _ in range(4)]
    other = api.upload(b"x", purpose="evals").json()["id"]

    def page(**params: Any) -> tuple[list[str], bool]:
        reply = api.harness.get("/v1/files", params=params).json()
        found = [item["id"] for item in reply["data"]]
        assert (reply["first_id"], reply["last_id"]) == ((found[0], found[-1]) if found else (None, None))
        return found, reply["has_more"]

    assert page() == ([other, *reversed(ids)], False)
    assert page(order="asc", purpose="batch") == (ids, False)
    assert page(order="asc", limit=2) == (ids[:2], True)
    assert page(order="asc", limit=2, after=ids[1]) == (ids[2:], True)
    assert page(purpose="evals", limit=1) == ([other], False)
    assert page(purpose="vision") == ([], False)
    for bad in ({"limit": -1}, {"limit": 10_001}, {"order": "up"}, {"after": "file-none"}, {"limit": "many"}):
        assert api.harness.get("/v1/files", params=bad).status_code == 400


TRICKS = [
    "../../../etc/passwd.jsonl",
    "/etc/passwd.jsonl",
    "..\\..\\x.jsonl",
    "a/b/c.jsonl",
    "~/x.jsonl",
    "日本語 名.jsonl",
]


@pytest.mark.parametrize("name", TRICKS)
def test_a_file_name_is_only_a_name(shared: Api, name: str) -> None:
    """Whatever it looks like, the bytes lie under a generated name inside the folder."""
    reply = shared.upload(b"{}", name)
    assert reply.status_code == 200, reply.text
    file = reply.json()
    assert file["filename"]
    storage = Path(shared.harness.settings.file_storage_path)
    assert (storage / "files" / file["id"]).read_bytes() == b"{}"


@pytest.mark.parametrize(
    "file_id", ["..%2f..%2fetc%2fpasswd", "%2e%2e", "file-%00", "x" * 65, "file-none", "dovetail.db"]
)
def test_an_id_is_never_a_path(shared: Api, file_id: str) -> None:
    """An id that was not given out is 404 or 400, for every method."""
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{file_id}"):
        assert shared.harness.get(path).status_code in (400, 404)
    assert shared.harness.http.delete(f"{shared.harness.base}/v1/files/{file_id}", timeout=60).status_code in (400, 404)


def form(*parts: tuple[str, bytes], end: bytes = b"--X--\r\n") -> bytes:
    return (
        b"".join(
            b"--X\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + body + b"\r\n"
            for head, body in parts
        )
        + end
    )


FILE = ('name="file"; filename="a.jsonl"', b"{}")
PURPOSE = ('name="purpose"', b"batch")
X = "multipart/form-data; boundary=X"
BAD_FORMS: dict[str, tuple[str, bytes, int, str | None]] = {
    "json": ("application/json", b"{}", 415, None),
    "no type": ("", b"{}", 415, None),
    "urlencoded": ("application/x-www-form-urlencoded", b"a=b", 415, None),
    "no boundary": ("multipart/form-data", form(FILE, PURPOSE), 400, None),
    "long boundary": ("multipart/form-data; boundary=" + "x" * 300, form(FILE, PURPOSE), 400, None),
    "garbage": (X, b"garbage", 400, None),
    "empty": (X, b"", 400, "file"),
    "cut off": (X, form(PURPOSE, FILE, end=b"")[:-8], 400, None),
    "no end": (X, form(PURPOSE, FILE, end=b"--X\r\n"), 400, None),
    "no file": (X, form(PURPOSE), 400, "file"),
    "no purpose": (X, form(FILE), 400, "purpose"),
    "file as text": (X, form(('name="file"', b"{}"), PURPOSE), 400, "file"),
    "twice": (X, form(FILE, FILE, PURPOSE), 400, "file"),
    "purpose twice": (X, form(FILE, PURPOSE, PURPOSE), 400, "purpose"),
    "unknown field": (X, form(FILE, PURPOSE, ('name="colour"', b"red")), 400, "colour"),
    "wrong purpose": (X, form(FILE, ('name="purpose"', b"batch_output")), 400, "purpose"),
    "NUL in purpose": (X, form(FILE, ('name="purpose"', b"ba\0tch")), 400, None),
    "no UTF-8": (X, form(FILE, ('name="purpose"', b"\xff\xfe")), 400, None),
    "surrogate": (X, form(FILE, ('name="purpose"', b"\xed\xa0\x80")), 400, None),
    "NUL in name": (X, form(('name="file"; filename="a\0.jsonl"', b"{}"), PURPOSE), 400, None),
    "long name": (X, form((f'name="file"; filename="{"a" * 600}.jsonl"', b"{}"), PURPOSE), 400, None),
    "other suffix": (X, form(('name="file"; filename="a.txt"', b"{}"), PURPOSE), 400, "file"),
    "huge header": (X, form((f'name="file"; filename="a"; x="{"y" * 20_000}"', b"{}"), PURPOSE), 400, None),
    "huge field": (X, form(FILE, ('name="purpose"', b"x" * 9000)), 400, "purpose"),
    "many fields": (X, form(*((f'name="f{i}"', b"") for i in range(40))), 400, None),
    "expiry without anchor": (
        X,
        form(FILE, PURPOSE, ('name="expires_after[seconds]"', b"3600")),
        400,
        "expires_after.anchor",
    ),
    "expiry too soon": (
        X,
        form(FILE, PURPOSE, ('name="expires_after[anchor]"', b"created_at"), ('name="expires_after[seconds]"', b"1")),
        400,
        "expires_after.seconds",
    ),
    "expiry no number": (
        X,
        form(FILE, PURPOSE, ('name="expires_after[anchor]"', b"created_at"), ('name="expires_after[seconds]"', b"1e9")),
        400,
        "expires_after.seconds",
    ),
}


@pytest.mark.parametrize("name", list(BAD_FORMS))
def test_a_bad_form_is_refused_and_leaves_nothing(shared: Api, name: str) -> None:
    """A 4xx in the usual form, with the field at fault; no bytes stay on disk."""
    content_type, body, status, param = BAD_FORMS[name]
    headers = {"content-type": content_type} if content_type else {}
    reply = shared.harness.post("/v1/files", data=body, headers=headers)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param
    assert not list((Path(shared.harness.settings.file_storage_path) / "tmp").iterdir())


def test_files_over_the_limit(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """413 for the file, whether its length is announced or not; one at the limit is taken."""
    api = Api(make_harness(file_storage_path=tmp_path, max_file_bytes=100_000, min_free_disk_bytes=0))
    assert api.upload(b"x" * 100_000).status_code == 200
    assert api.upload(b"x" * 100_001).status_code == 413

    def pieces() -> Iterator[bytes]:
        yield form(PURPOSE, end=b"") + b'--X\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        for _ in range(30):
            yield b"y" * 10_000

    reply = api.harness.post("/v1/files", data=pieces(), headers={"content-type": X})
    assert reply.status_code == 413
    assert not list((tmp_path / "tmp").iterdir())


def test_a_client_that_leaves_in_the_middle_leaves_nothing(api: Api) -> None:
    """The unfinished file goes, and the server goes on."""
    api.upload(b"{}")
    temp = Path(api.harness.settings.file_storage_path) / "tmp"
    with socket.create_connection(("127.0.0.1", api.harness.port)) as connection:
        head = (
            f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {X}\r\ncontent-length: 9000000\r\n\r\n"
        ).encode()
        connection.sendall(head + form(FILE, end=b"")[:-2] + b"z" * 2_000_000)
        api.harness.eventually(lambda: bool(list(temp.iterdir())))
    api.harness.eventually(lambda: not list(temp.iterdir()))
    assert api.upload(b"{}").status_code == 200


def test_expiry(api: Api) -> None:
    """A file past its time is gone at once, and its bytes with the next sweep."""
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(HOUR)}
    file = api.upload(b"{}", **fields).json()
    assert file["expires_at"] == file["created_at"] + HOUR
    service = api.harness.state.storage._service

    async def age() -> None:
        from dovetail_server.storage.tables import files

        async with service.database.write() as db:
            await db.execute(sa.update(files).values(expires_at=int(time.time()) - 1))
        assert await service.files.find(file["id"], "") is None
        await service.files.sweep()  # the server's own may come first, and still be removing the bytes

    asyncio.run_coroutine_threadsafe(age(), api.harness.loop).result(60)
    assert api.harness.get(f"/v1/files/{file['id']}").status_code == 404
    folder = Path(api.harness.settings.file_storage_path) / "files"
    api.harness.eventually(lambda: not list(folder.iterdir()))


def test_what_was_left_is_removed_at_the_second_look(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes without a row and unfinished uploads go when they are old; one jump of the clock makes nothing old."""
    from dovetail_server.storage import files

    file_id = api.upload(b"kept").json()["id"]
    service = api.harness.state.storage._service
    left = [service.layout.file("file-without-row"), service.layout.temp / "unfinished"]
    for path in left:
        path.write_bytes(b"x")
    for path in [*left, service.layout.file(file_id)]:
        os.utime(path, (0, 0))
    monkeypatch.setattr(files, "LOOK_EVERY", 1)

    def sweep() -> None:
        asyncio.run_coroutine_threadsafe(service.files.sweep(), api.harness.loop).result(60)

    service.files._left = set()
    sweep()
    assert all(path.exists() for path in left)
    sweep()
    assert not any(path.exists() for path in left)
    assert api.harness.get(f"/v1/files/{file_id}/content").content == b"kept"


def test_the_quota_and_the_free_space_are_507(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """Before anything is written."""
    api = Api(make_harness(file_storage_path=tmp_path / "a", max_storage_bytes=1000, min_free_disk_bytes=0))
    assert api.upload(b"x" * 600).status_code == 200
    reply = api.upload(b"x" * 600)
    assert (reply.status_code, reply.json()["error"]["code"]) == (507, "insufficient_storage")
    api = Api(make_harness(file_storage_path=tmp_path / "b", min_free_disk_bytes=1 << 50))
    reply = api.upload(b"x")
    assert reply.status_code == 507
    assert "--min-free-disk-bytes" in reply.json()["error"]["message"]
    assert int(reply.headers["retry-after"]) > 0


def test_an_input_may_be_deleted_while_its_batch_runs(api: Api) -> None:
    """A batch that has begun keeps hold of what it reads."""
    api.harness.engine.delay_s = 0.01
    batch_id = api.start(*(line(str(i)) for i in range(100)))
    batch = api.wait(batch_id, "in_progress")
    path = f"{api.harness.base}/v1/files/{batch['input_file_id']}"
    assert api.harness.http.delete(path, timeout=60).json()["deleted"]
    assert api.wait(batch_id)["request_counts"]["completed"] == 100


def test_results_expire_as_asked(api: Api) -> None:
    """`output_expires_after` becomes the `expires_at` of both files."""
    batch = api.run(line("a"), line("b", n=0), output_expires_after={"anchor": "created_at", "seconds": 2 * HOUR})
    for file_id in (batch.get("output_file_id"), batch.get("error_file_id")):
        file = api.harness.get(f"/v1/files/{file_id}").json()
        assert file["purpose"] == "batch_output"
        assert file["filename"].endswith(".jsonl")
        assert file["expires_at"] == file["created_at"] + 2 * HOUR


def test_a_large_upload_stays_out_of_memory(api: Api) -> None:
    """The peak of the process grows by less than the file (the benchmark measures it at 200 MB)."""
    api.upload(b"{}")
    block = json.dumps(line("x")).encode() + b"\n"

    def pieces() -> Iterator[bytes]:
        yield form(PURPOSE, end=b"") + b'--X\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        for _ in range(80):
            yield (block * (1 + (1 << 20) // len(block)))[: 1 << 20]
        yield b"\r\n--X--\r\n"

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reply = api.harness.post("/v1/files", data=pieces(), headers={"content-type": X})
    assert reply.json()["bytes"] == 80 << 20
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 40 << 10, f"grew by {grown} KiB"


def test_a_folder_that_cannot_be_used_is_503(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """The reply says what is wrong, readiness too, and the rest of the server works."""
    (tmp_path / "taken").write_text("a file")
    harness = make_harness(file_storage_path=tmp_path / "taken")
    reply = Api(harness).upload(jsonl(line("a")))
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "storage_unavailable"
    ready = harness.get("/readyz")
    assert ready.status_code == 503
    assert "file-storage-path" in ready.text
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    assert harness.post("/v1/chat/completions", body).status_code == 200


def test_readiness_comes_back_by_itself(
    make_harness: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that can be used again makes the server ready again, though nobody uploads anything."""
    monkeypatch.setattr("dovetail_server.batches.lazy.RETRY_S", 0.05)
    (tmp_path / "taken").write_text("a file")
    harness = make_harness(file_storage_path=tmp_path / "taken")
    assert Api(harness).upload(jsonl(line("a"))).status_code == 503
    for _ in range(3):
        assert harness.get("/readyz").status_code == 503
        time.sleep(0.06)
    (tmp_path / "taken").unlink()
    harness.eventually(lambda: harness.get("/readyz").status_code == 200)
    assert Api(harness).upload(jsonl(line("a"))).status_code == 200


def test_a_quota_counts_uploads_of_unknown_length(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """A file whose length is not announced is refused when it has arrived."""
    api = Api(make_harness(file_storage_path=tmp_path, max_storage_bytes=1000, min_free_disk_bytes=0))

    def pieces() -> Iterator[bytes]:
        yield form(PURPOSE, ('name="file"; filename="a.jsonl"', b"x" * 2000))

    reply = api.harness.post("/v1/files", data=pieces(), headers={"content-type": X})
    assert reply.status_code == 507
    assert not list((tmp_path / "files").iterdir())


def test_a_database_of_another_kind_is_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, before anything is loaded."""
    from dovetail_server.cli import main

    assert main(["serve", "--database-url", "mysql://user:secret@host/name"]) == 2
    error = capsys.readouterr().err
    assert "--database-url: 'mysql' is not supported; give postgresql+psycopg://" in error
    assert "secret" not in error


def test_listing_is_cut_into_pages(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is asked for, a page stays short, and says that there is more."""
    from dovetail_server.routes import files

    monkeypatch.setattr(files, "MAX_PAGE", 2)
    for _ in range(3):
        api.upload(b"{}")
    reply = api.harness.get("/v1/files", params={"limit": 10_000}).json()
    assert (len(reply["data"]), reply["has_more"]) == (2, True)
