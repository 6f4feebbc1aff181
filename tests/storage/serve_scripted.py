"""A server over a scripted engine in a process of its own, to be killed or stopped. Arguments: model folder, settings.

Settings are JSON: those of the server, and `delay_s` (of the engine), `beat_s` and `silent_beats` (of leases), `steps`
(whether calls to disk and database are watched). On standard input it takes commands, each answered by a line of JSON:
`watch`, `arm [SITE, OCCURRENCE]` (stop this process there), `disarm`, `sites`, `clock [SECONDS]` (how far it is off),
`serve NAMES` (look after batches of these only), `patience [LOOKS]` (as `silent_beats`),
`delay [SECONDS]` (as `delay_s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from harness import Harness
from steps import Steps, watch_database, watched_disk

from dovetail_server.batches import processes
from dovetail_server.serving.served import Served
from dovetail_server.storage.database import Database


def main(folder: str, options: str) -> None:
    settings: dict[str, Any] = json.loads(options)
    delay_s = settings.pop("delay_s", 0.0)
    processes.BEAT_S = settings.pop("beat_s", processes.BEAT_S)
    processes.SILENT_BEATS = settings.pop("silent_beats", processes.SILENT_BEATS)
    steps = Steps()
    is_watched = settings.pop("steps", False)
    with watched_disk(steps) if is_watched else contextlib.nullcontext():
        harness = Harness(Path(folder), min_free_disk_bytes=0, **settings)
        harness.engine.delay_s = delay_s
        harness.eventually(lambda: harness.server.started)
        asyncio.run_coroutine_threadsafe(harness.state.storage.resume(), harness.loop)
        print(harness.port, flush=True)
        obey(harness, steps, is_watched)
        threading.Event().wait()


def obey(harness: Any, steps: Steps, is_watched: bool) -> None:
    """Take commands until standard input ends."""
    commands = Commands(harness, steps, is_watched)
    for text in sys.stdin:
        name, _, rest = text.strip().partition(" ")
        print(json.dumps(getattr(commands, name)(*json.loads(rest or "[]"))), flush=True)


class Commands:
    """What the test may ask for; each is a method."""

    def __init__(self, harness: Any, steps: Steps, is_watched: bool) -> None:
        self.harness = harness
        self.steps = steps
        self.clock_s = 0.0
        if is_watched:
            real, real_now = time.time, Database.now
            time.time = lambda: real() + self.clock_s
            Database.now = lambda database: real_now(database) + self.clock_s  # type: ignore[method-assign]

    def watch(self) -> bool:
        """Begin to watch the database, which is open by now."""
        future = asyncio.run_coroutine_threadsafe(self.harness.state.storage.get(), self.harness.loop)
        watch_database(future.result(60).database.engine, self.steps)
        return True

    def arm(self, site: str, occurrence: int) -> bool:
        self.steps.arm(site, lambda _: os.kill(os.getpid(), signal.SIGSTOP), occurrence)
        return True

    def disarm(self) -> bool:
        was_armed = self.steps.is_armed
        self.steps.disarm()
        return was_armed

    def sites(self) -> dict[str, int]:
        """Return what was called since the last time."""
        seen, self.steps.seen = self.steps.seen, Counter()
        return dict(seen)

    def serve(self, *names: str) -> bool:
        """Look after batches of these names only."""
        future = asyncio.run_coroutine_threadsafe(self.harness.state.storage.get(), self.harness.loop)
        future.result(60).batches.served = Served(list(names), [])
        return True

    def patience(self, looks: int) -> bool:
        """Wait for so many looks before others are taken for gone."""
        processes.SILENT_BEATS = looks
        return True

    def delay(self, seconds: float) -> bool:
        """Let each token take so long."""
        self.harness.engine.delay_s = seconds
        return True

    def clock(self, seconds: float) -> bool:
        self.clock_s = seconds
        return True


if __name__ == "__main__":
    main(*sys.argv[1:])
