"""A server that ends with whoever started it: `python -m dovetail_server.cli.parent_bound FD serve …`.

The other end of the pipe `FD` is its parent's; when that process has ended, however it ended, the pipe hangs up.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading

from dovetail.base.orphans import wake_when_orphaned


def end_with(pipe: int) -> None:
    """Have this process told to end, as by SIGTERM, when the other end of a pipe is closed."""
    threading.Thread(target=_watch, args=(pipe,), name="dovetail-parent-watch", daemon=True).start()


def _watch(pipe: int) -> None:
    poller = select.poll()
    poller.register(pipe, 0)  # a hang-up is always told
    poller.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Watch the pipe, and be `dovetail` with the other arguments."""
    from dovetail_server.cli import main as dovetail

    wake_when_orphaned()
    end_with(int(argv[0]))
    return dovetail(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
