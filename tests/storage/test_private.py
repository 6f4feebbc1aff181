"""What storage keeps is closed to other users of the machine, from its first moment and whatever the umask is."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail_server.storage import paths
from dovetail_server.storage.paths import StoragePaths

from .conftest import Api, line


def open_to_others(folder: Path) -> list[str]:
    paths = [folder, *folder.rglob("*")]
    return [f"{path} {stat.S_IMODE(path.stat().st_mode):04o}" for path in paths if path.stat().st_mode & 0o077]


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_nothing_is_open_to_others(make_harness: Callable[..., Any], tmp_path: Path, no_umask: None) -> None:
    """With a umask that takes nothing away: database, journals, files, segments, locks and folders are the user's."""
    storage = tmp_path / "storage"
    api = Api(make_harness(file_storage_path=storage, min_free_disk_bytes=0))
    api.run(line("a"))
    api.harness.engine.hold.clear()
    batch_id = api.start(line("b"))
    api.wait(batch_id, "in_progress")
    names = {path.name for path in storage.iterdir()}
    assert {"dovetail.db", "dovetail.db-wal", "dovetail.db-shm", "files", "batches"} <= names
    assert open_to_others(storage) == []
    api.harness.engine.hold.set()
    api.wait(batch_id)


def test_what_was_open_is_closed(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """A folder of an older version with files that others could read is closed when it is opened again."""
    storage = tmp_path / "storage"
    first = Api(make_harness(file_storage_path=storage, min_free_disk_bytes=0))
    file_id = first.upload(b"{}").json()["id"]
    first.harness.close()
    for path in [storage, *storage.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    second = make_harness(file_storage_path=storage)
    assert second.get(f"/v1/files/{file_id}/content").content == b"{}"
    assert open_to_others(storage) == []


def test_a_folder_with_other_things_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A home is not closed for its owner's friends; what is ours in it is, and a warning says how to hide it."""
    tmp_path.chmod(0o755)
    (tmp_path / "letters").mkdir(mode=0o755)
    paths.logger.parent.propagate = True  # type: ignore[union-attr]
    StoragePaths(tmp_path).create()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "letters").stat().st_mode) == 0o755
    assert open_to_others(tmp_path / "files") == []
    assert f"chmod 700 {tmp_path}" in caplog.text


def test_a_folder_that_others_may_write_to_is_refused(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """Whoever can replace what is in it could read all: 503, and the command that helps."""
    (tmp_path / "letters").mkdir()
    tmp_path.chmod(0o777)
    reply = make_harness(file_storage_path=tmp_path).get("/v1/files")
    assert reply.status_code == 503
    assert f"chmod go-w {tmp_path}" in reply.text
    tmp_path.chmod(0o1777)  # as /tmp is: others cannot replace what is ours
    assert make_harness(file_storage_path=tmp_path).get("/v1/files").status_code == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_part_of_somebody_else_is_refused(make_harness: Callable[..., Any], tmp_path: Path) -> None:
    """Its owner could read and change what is in it."""
    (tmp_path / "files").mkdir()
    os.chown(tmp_path / "files", 12345, -1)
    reply = make_harness(file_storage_path=tmp_path).get("/v1/files")
    assert reply.status_code == 503
    assert "belongs to user 12345" in reply.text
