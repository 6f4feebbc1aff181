"""Where things lie under `--file-storage-path`. Every name is generated here; none comes from a client."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from dovetail.base.identity import time_ns, token_hex
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.storage.private import make_private

DATABASE = "dovetail.db"
MIGRATION_LOCK = "migrate.lock"


def storage_folder(settings: ServeSettings) -> Path:
    """Return the folder of files and batches; it need not exist."""
    if settings.file_storage_path is not None:
        return settings.file_storage_path.expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share") / "dovetail"


def new_id(prefix: str) -> str:
    """Return an identifier that nobody can guess and that sorts by age."""
    return f"{prefix}{time_ns():016x}{token_hex(12)}"


def result_file_id(batch_id: str, kind: str, epoch: int) -> str:
    """Return the identifier of a batch's output or error file, as the attempt with this token publishes it."""
    return "file-" + hashlib.sha256(f"{batch_id}:{kind}:{epoch}".encode()).hexdigest()[:40]


class StoragePaths:
    """The folder's parts."""

    def __init__(self, folder: Path) -> None:
        """Name them; `create` makes them."""
        self.folder = folder
        self.files = folder / "files"
        self.temp = folder / "tmp"
        self.batches = folder / "batches"
        self.owners = folder / "owners"

    def create(self) -> None:
        """Create what is missing, for this user alone; see `make_private`.

        Raises:
            OSError: It cannot be.
        """
        make_private(self.folder, (self.files, self.temp, self.batches, self.owners), (DATABASE, MIGRATION_LOCK))

    @property
    def database(self) -> Path:
        """The SQLite database; its journals are beside it and have its mode."""
        return self.folder / DATABASE

    def file(self, file_id: str) -> Path:
        """Return where a file's bytes are; the id is one that was read from the database."""
        return self.files / file_id

    def new_temp(self) -> Path:
        """Return a name for a file that is being written."""
        return self.temp / secrets.token_hex(16)

    def batch(self, batch_id: str) -> Path:
        """Return the folder of a batch's input and segments."""
        return self.batches / batch_id
