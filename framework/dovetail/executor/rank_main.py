"""A further rank: `python -m dovetail.executor.rank_main FD`. Started by `GroupExecutor`, never by hand.

It does what the first rank does, step by step, and keeps what comes of it to itself. When the first rank ends, so does
its pipe, and this process.
"""

from __future__ import annotations

import logging
import select
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from dovetail import log
from dovetail.errors import ConfigError
from dovetail.executor.local import LocalExecutor
from dovetail.executor.rank_messages import (
    Choose,
    Command,
    Connect,
    Done,
    Launch,
    Read,
    Ready,
    Refused,
    StartProfile,
    StartRank,
    StopProfile,
    next_command,
    send,
)
from dovetail.messages.executor import ProfileError, StepError
from dovetail.orphans import wake_when_orphaned
from dovetail.plugins import load
from dovetail.plugins.loader import naming_plugin
from dovetail.plugins.manager import running_hooks
from dovetail.runtime.ranks import GlooCommunicator, Rank, parallel_of
from dovetail.settings import EngineSettings

logger = logging.getLogger("dovetail.engine")
LEAVE_S = 2.0
"""What a rank has to end in order once the first one has ended."""


def main(argv: list[str]) -> int:
    """Serve until the first rank ends; returns the exit code."""
    wake_when_orphaned()
    log.follow("rank")
    # They reach the whole process group; the parent decides when the engine stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = Connection(int(argv[0]))
    threading.Thread(target=_watch, args=(pipe,), name="dovetail-rank-watch", daemon=True).start()
    try:
        start = next_command(pipe)
        if not isinstance(start, StartRank):
            raise TypeError(f"the first command is to start, not {type(start).__name__}")
        log.setup(logging.getLevelName(start.log_level).lower(), process=f"rank {start.rank}")
        serve(pipe, start)
    except (EOFError, OSError):
        return 0
    return 0


def _watch(pipe: Connection) -> None:
    """End this process soon after the first rank's, even in the middle of what never ends."""
    poller = select.poll()
    poller.register(pipe.fileno(), 0)  # a hang-up is always told
    poller.poll()
    signal.setitimer(signal.ITIMER_REAL, LEAVE_S)


def serve(pipe: Connection, start: StartRank) -> None:
    """Load the model and follow the first rank.

    Raises:
        EOFError: It has ended.
    """
    sums = GlooCommunicator(start.rank, start.size)
    settings = EngineSettings.model_validate(start.settings)
    rank = Rank(parallel_of(settings, start.rank, sums), start.memory)
    try:
        plugins = load(start.plan, "worker")
        with running_hooks(plugins, start.rank):
            with naming_plugin(plugins):
                executor = LocalExecutor(settings, plugins, rank)
            send(pipe, Ready())
            follow(pipe, executor, sums)
    except ConfigError as error:
        send(pipe, Refused(str(error), is_users=True))
    except (EOFError, OSError):
        raise
    except Exception as error:  # whatever it was, the first rank must hear of it
        logger.critical("rank %d stopped", start.rank, exc_info=error)
        send(pipe, Refused(f"{type(error).__name__}: {error}", is_users=False))


def follow(pipe: Connection, executor: LocalExecutor, sums: GlooCommunicator) -> None:
    """Do what the first rank does.

    Raises:
        EOFError: It has ended, or does something else.
    """
    while True:
        command = next_command(pipe)
        if isinstance(command, StartProfile | StopProfile):
            send(pipe, _profiled(command, executor))
            continue
        work = _work_of(command, executor, sums)
        try:
            work()
        except StepError as failure:
            if sums.is_broken:
                raise EOFError(failure.text) from failure
            send(pipe, Done(failure.text))
        else:
            send(pipe, Done())


def _profiled(command: StartProfile | StopProfile, executor: LocalExecutor) -> Done:
    try:
        if isinstance(command, StopProfile):
            return Done(files=tuple(executor.stop_profile()))
        executor.start_profile(command.spec)
    except ProfileError as error:
        return Done(str(error))
    return Done()


def _work_of(command: Command, executor: LocalExecutor, sums: GlooCommunicator) -> Callable[[], object]:
    match command:
        case Connect(meeting, timeout_s):
            return lambda: sums.connect(Path(meeting), timeout_s)
        case Launch(step):
            return lambda: executor.launch(step)
        case Choose(late, masks):
            if len(masks):
                executor.masks(len(masks))[:] = masks
            return lambda: executor.choose(late)
        case Read():
            return executor.read
        case _:
            raise RuntimeError(f"{type(command).__name__} is no step's")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
