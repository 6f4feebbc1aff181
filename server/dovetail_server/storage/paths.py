"""Where things lie under `--file-storage-path`. Every name is generated here; none comes from a client."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from dovetail.base.identity import time_ns, token_hex
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.storage.disk import FILE_MODE, FOLDER_MODE, make_folder

# Keeping the storage folder to its user: what is made is closed, and what was left open is shut.

logger = logging.getLogger("dovetail.server")
OTHERS = 0o077


def make_private(folder: Path, parts: Iterable[Path], files: Iterable[str]) -> None:
    """Make a folder and its parts for this user alone.

    Parts and files of ours that are open to others are closed. The folder itself may be one that the user has other
    things in (a home, `/srv`), so it is closed only where it holds nothing else; otherwise a warning says what to do.

    Args:
        folder: Made with what is above it, if need be.
        parts: Folders in it.
        files: Names of files in it that are ours, and of files that may begin so.

    Raises:
        OSError: It cannot be made, or a part of it belongs to somebody else, who could read and change it.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_folder(folder)
    parts, files = list(parts), tuple(files)
    others = [name for name in os.listdir(folder) if folder / name not in parts and not name.startswith(files)]
    _close_top(folder, is_ours=not others)
    for part in parts:
        make_folder(part)
        _check_owner(part)
        if _mode(part) & OTHERS:
            _close_tree(part)
    for name in os.listdir(folder):
        if name.startswith(files):
            _check_owner(folder / name)
            _close(folder / name, FILE_MODE)


def _close_top(folder: Path, *, is_ours: bool) -> None:
    mode, is_mine = _mode(folder), os.stat(folder).st_uid == os.geteuid()
    if not mode & OTHERS:
        return
    if is_mine and is_ours:
        _close(folder, FOLDER_MODE)
    elif mode & 0o022 and not mode & stat.S_ISVTX:
        text = f"others may replace what is in it (mode {mode:04o}); run: chmod go-w {folder}"
        raise PermissionError(0, text)
    else:
        logger.warning(
            "%s is open to other users (mode %04o). What Dovetail keeps in it is not, but to hide its names, too: "
            "chmod 700 %s",
            folder,
            mode,
            folder,
        )


def _close_tree(part: Path) -> None:
    """Close a folder that was open, and all that is in it."""
    for path, folders, names in os.walk(part):
        for name in folders:
            _close(Path(path, name), FOLDER_MODE)
        for name in names:
            _close(Path(path, name), FILE_MODE)
    _close(part, FOLDER_MODE)
    logger.warning("%s was open to other users of this machine; it is closed now (mode 0700).", part)


def _check_owner(path: Path) -> None:
    found = os.stat(path).st_uid
    if found != os.geteuid():
        text = f"{path} belongs to user {found}, who can read and change it; run: chown -R {os.geteuid()} {path}"
        raise PermissionError(0, text)


def _close(path: Path, mode: int) -> None:
    if _mode(path) & OTHERS:
        os.chmod(path, mode)


def _mode(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


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
