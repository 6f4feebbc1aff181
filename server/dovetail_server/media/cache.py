"""`ImageCache`: arrays of images that were decoded lately, so that an image is decoded once, whoever sends it again."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from dovetail.cache.by_owner import SharedSpace
from dovetail.processing.images import PreparedImage
from dovetail_server.media.folder import KEPT, MediaFiles

CacheKey = tuple[str, bytes]
"""What keeps callers apart that share nothing, and the digest of `source_digest`."""
ENTRY_BYTES = 16 << 10
"""What an entry counts for beside its arrays: a file and what names it take memory, too."""
FREE_SHARE = 0.5
"""The cache leaves requests at least this share of what its file system has free."""


class ImageCache:
    """Of one server. Used from its event loop.

    An entry's file is a name of its own for what a request's process has written (a hard link), and each request that
    finds it gets another. So requests keep their arrays however the cache goes on, and remove no one else's.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Begin empty.

        Args:
            folder: That of the arrays.
            max_bytes: Of all entries; 0 keeps nothing.
        """
        self._folder, self._max_bytes = folder, max_bytes
        (folder / KEPT).mkdir(mode=0o700, exist_ok=True)
        self._space: SharedSpace[CacheKey] = SharedSpace()
        self._entries: dict[CacheKey, tuple[PreparedImage, MediaFiles]] = {}
        self._being_made: dict[CacheKey, asyncio.Event] = {}
        self._num_names = 0
        self.num_found = 0
        """Images that were not decoded again."""

    async def find(self, key: CacheKey, job: str) -> PreparedImage | None:
        """Return an image that is kept, in a file of the job; None has the caller make it, and call `end` in any case.

        While another request makes it, this waits for that.
        """
        while (event := self._being_made.get(key)) is not None:
            await event.wait()
        if key in self._entries and (image := self._linked(self._entries[key][0], f"{job}found-")) is not None:
            self._space.use(key)
            self.num_found += 1
            return image
        self._being_made[key] = asyncio.Event()
        return None

    def end(self, key: CacheKey, owner: str, image: PreparedImage | None) -> None:
        """An image was made, or could not be.

        Args:
            key: That of `find`.
            owner: Who brought it: whoever brings much has images of its own pushed out first.
            image: What was made; None where it failed, so whoever waits tries it.
        """
        self._being_made.pop(key).set()
        if image is None or (kept := self._linked(image, f"{KEPT}/")) is None:
            return
        files = MediaFiles([kept.file])
        status = os.stat(kept.file)
        system = os.statvfs(self._folder)
        size = status.st_size + ENTRY_BYTES
        room = min(self._max_bytes, self._space.total + size + int(FREE_SHARE * system.f_bavail * system.f_frsize))
        if size > room:
            files.close()
            return
        self._drop(key)  # its file was removed by somebody
        while self._space.total + size > room and (last := self._space.victim(owner, size)) is not None:
            self._drop(last)
        self._space.add(key, owner, size)
        self._entries[key] = kept, files

    def _drop(self, key: CacheKey) -> None:
        self._space.remove(key)
        if (entry := self._entries.pop(key, None)) is not None:
            entry[1].close()

    def _linked(self, image: PreparedImage, start: str) -> PreparedImage | None:
        """Return an image under another name; None where its file is gone, or the file system has no room."""
        self._num_names += 1
        path = self._folder / f"{start}{self._num_names:x}"
        with suppress(OSError):
            os.link(image.file, path)
            return replace(image, file=str(path))
        return None
