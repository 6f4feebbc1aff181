"""Reading the file of `--keys-file` again when it has changed."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dovetail.contracts.errors import ConfigError
from dovetail_server.tenants.keys_file import KeyEntry, read_keys_file

logger = logging.getLogger("dovetail.server")
EVERY_S = 1.0
Stamp = tuple[int, ...] | str


class KeysFileWatch:
    """Follows one file. While it cannot be used, which is logged and counted, the keys before hold."""

    def __init__(self, path: Path, use: Callable[[Sequence[KeyEntry]], None], every_s: float = EVERY_S) -> None:
        """Read the file for the first time, and give `use` its keys; so again whenever others are in it.

        Raises:
            ConfigError: It cannot be used.
        """
        self.path = path
        self.num_failures = 0
        """Times that a changed file could not be used."""
        self.is_current = True
        """Whether the keys in force are those of the file."""
        self._use = use
        self._every_s = every_s
        self._known = _stamp(path)
        use(read_keys_file(path))

    async def follow(self) -> None:
        """Look at the file now and then, for ever."""
        last = self._known
        while True:
            await asyncio.sleep(self._every_s)
            stamp = await asyncio.to_thread(_stamp, self.path)
            if stamp == last and stamp != self._known:  # whoever writes it has come to an end
                self._known = stamp
                await self._read()
            last = stamp

    async def _read(self) -> None:
        try:
            keys = await asyncio.to_thread(read_keys_file, self.path)
        except ConfigError as error:
            self.num_failures += 1
            self.is_current = False
            logger.error("%s. The keys before this change stay in force.", error)
            return
        self.is_current = True
        self._use(keys)
        logger.info("Keys file %s reloaded: %d keys.", self.path, len(keys))


def _stamp(path: Path) -> Stamp:
    """Return what changes whenever a file does, or why it cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError as error:
        return str(error.strerror)
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
