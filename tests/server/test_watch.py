"""What ends a call of a package's code: the call alone, or the process where nothing else helps."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from dovetail.contracts.errors import PluginError
from dovetail_server.apis.watch import Watch


def test_what_cannot_be_ended_ends_the_process(tmp_path: Path) -> None:
    """A call on the event loop that catches all that ends it: the process ends with a line that names it."""
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio\n"
        "from dovetail_server.apis.watch import WATCH\n"
        "def stubborn():\n"
        "    while True:\n"
        "        try:\n"
        "            while True: sum(range(100))\n"
        "        except BaseException: pass\n"
        "async def serve():\n"
        "    WATCH.limit_s = 0.5\n"
        "    WATCH.start()\n"
        "    WATCH.run('api of acme: /x: read()', stubborn)\n"
        "asyncio.run(serve())\n"
    )
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "api of acme: /x: read() does not end, and no request is answered meanwhile: the server ends" in ended.stderr


def test_an_exception_that_comes_late_hurts_nobody() -> None:
    """A call that ends while it is being ended leaves none behind for its thread."""
    watch = Watch()
    watch.limit_s = 0.0
    for _ in range(200):
        with suppress(PluginError):
            watch.run("a call", lambda: watch._end(threading.get_ident(), watch._calls[threading.get_ident()]))
        for _ in range(100):
            time.sleep(0)
        assert not watch._calls
