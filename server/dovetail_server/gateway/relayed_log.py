"""The workers' lines in the one log, each with the name of its worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Callable

from dovetail_server.start.run import ANNOUNCEMENTS

TIMED = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] ")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
REFUSAL = "dovetail serve: error: "
FAILURE = "dovetail serve: "
MAX_LINE_BYTES = 1 << 16


def tagged(line: str, tag: str) -> str | None:
    """Return a worker's line with its tag, as SGLang's log has it; None for what is said once for all workers."""
    if line.startswith("{"):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if isinstance(fields, dict):
            is_announced = str(fields.get("message", "")).startswith(ANNOUNCEMENTS)
            return None if is_announced else json.dumps({**fields, "worker": tag})
    if (found := TIMED.match(line)) is None:
        return f"[{tag}] {line}"
    text = line[found.end() :]
    return None if text.startswith(ANNOUNCEMENTS) else f"[{found[1]} {tag}] {text}"


def write_line(line: str) -> None:
    """Write to standard error. A worker whose lines nobody takes stands still: a full disk must not come to that."""
    with contextlib.suppress(OSError, ValueError):  # as `logging` does: there is no other place to say it
        print(line, file=sys.stderr, flush=True)


class WorkerLog:
    """Passes on what one worker process writes, and keeps why it ended."""

    def __init__(self, tag: str, write: Callable[[str], None] | None = None) -> None:
        """Read nothing yet; `write` takes lines, standard error by default."""
        self.tag = tag
        self.reason: str | None = None
        """What it said of its end."""
        self._write = write or write_line

    def take(self, line: str) -> None:
        """Pass on one line."""
        plain = COLOURS.sub("", line.rpartition("\r")[2])  # of a bar that moves, the last state
        if plain.startswith("{") and self.tag and '"error"' in plain:
            self._keep_json(plain)
        if plain.startswith(FAILURE):
            self.reason = plain.removeprefix(REFUSAL).removeprefix(FAILURE)
        elif (shown := tagged(plain, self.tag)) is not None:
            self._write(shown)

    def _keep_json(self, line: str) -> None:
        try:
            message = str(json.loads(line).get("message", ""))
        except (ValueError, AttributeError, RecursionError):
            return
        if message.startswith(FAILURE):
            self.reason = message.removeprefix(REFUSAL).removeprefix(FAILURE)

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Pass on everything until the stream ends. A line that is too long comes in pieces."""
        while True:
            try:
                line = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    self.take(error.partial.decode("utf-8", "replace").rstrip())
                return
            except asyncio.LimitOverrunError as error:
                line = await stream.readexactly(error.consumed or MAX_LINE_BYTES)
            if text := line.decode("utf-8", "replace").rstrip():
                self.take(text)
