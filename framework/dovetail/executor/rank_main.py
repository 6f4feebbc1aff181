"""A further rank: `python -m dovetail.executor.rank_main FD`. Started by `GroupExecutor`, never by hand.

It does what the first rank does, step by step, and keeps what comes of it to itself. When the first rank ends, so does
its pipe, and this process.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from dovetail.base import log
from dovetail.base.orphans import wake_when_orphaned
from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import ConfigError, described, said
from dovetail.contracts.ranks import Communicator
from dovetail.executor.group import CONNECT_S, about
from dovetail.executor.local import LocalExecutor
from dovetail.executor.rank_messages import (
    Choose,
    Connect,
    Done,
    Launch,
    Ping,
    Prepare,
    RankFailed,
    Read,
    SetMemoryPlan,
    Settle,
    StartProfile,
    StartRank,
    StopProfile,
    WeightsLoaded,
    next_command,
    send,
)
from dovetail.messages.executor import ProfileError, StepError
from dovetail.plugins import LoadedPlugins, load
from dovetail.plugins.loader import naming_plugin
from dovetail.plugins.manager import running_hooks
from dovetail.runtime.device.devices import find_device
from dovetail.runtime.memory.plan import DeviceBytes, MemoryPlan
from dovetail.runtime.ranks import Rank, communicator, parallel_of

logger = logging.getLogger("dovetail.engine")
T = TypeVar("T")

SHUTDOWN_TIMEOUT_S = 2.0
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
    with contextlib.suppress(EOFError, OSError):
        start = _heard(pipe, StartRank, "the first command is to start")
        log.setup(logging.getLevelName(start.log_level).lower(), process=f"rank {start.rank}")
        serve(pipe, start)
    return 0


def _watch(pipe: Connection) -> None:
    """End this process soon after the first rank's, even in the middle of what never ends."""
    poller = select.poll()
    poller.register(pipe.fileno(), 0)  # a hang-up is always told
    poller.poll()
    signal.setitimer(signal.ITIMER_REAL, SHUTDOWN_TIMEOUT_S)


def _heard(pipe: Connection, kind: type[T], wanted: str) -> T:
    command = next_command(pipe)
    if not isinstance(command, kind):
        raise TypeError(f"{wanted}, not {type(command).__name__}")
    return command


class FollowerMeeting:
    """A further rank's side of the start; see `Meeting`."""

    def __init__(self, pipe: Connection, plugins: LoadedPlugins, links: Communicator, start: StartRank) -> None:
        """The pipe leads to the first rank, which has chosen what attends, and measured kernel sets."""
        self._pipe, self._plugins, self._links = pipe, plugins, links
        self.attention, self.kernels = start.attention, start.kernels

    def built(self, device: DeviceBytes) -> None:
        """Say what this rank is."""
        send(self._pipe, about(self._plugins, device))

    def loaded(self, left: int, plan: Callable[[int], MemoryPlan]) -> MemoryPlan:
        """Say what is left, and take what the first rank has planned."""
        send(self._pipe, WeightsLoaded(left))
        return _heard(self._pipe, SetMemoryPlan, "what is to be heard now is how memory is divided").memory

    def connect(self) -> None:
        """Meet the others, once all are ready to."""
        send(self._pipe, Done())
        command = _heard(self._pipe, Connect, "what is to be heard now is where to meet")
        self._links.connect(Path(command.meeting), CONNECT_S, command.timeout_s)


def serve(pipe: Connection, start: StartRank) -> None:
    """Load the model and follow the first rank.

    Raises:
        EOFError: It has ended.
    """
    settings = EngineSettings.model_validate(start.settings)
    try:
        plugins = load(start.plan, "worker")
        with running_hooks(plugins, start.rank):
            with naming_plugin(plugins):
                links = communicator(settings, start.rank, find_device(settings, plugins, start.rank))
                meeting = FollowerMeeting(pipe, plugins, links, start)
                executor = LocalExecutor(settings, plugins, Rank(parallel_of(settings, links), meeting, links))
            send(pipe, Done())
            try:
                follow(pipe, executor, links)
            finally:
                links.close()
    except ConfigError as error:
        send(pipe, RankFailed(said(error), is_users=True))
    except (EOFError, OSError):
        raise
    except Exception as error:  # whatever it was, the first rank must hear of it
        logger.critical("rank %d stopped", start.rank, exc_info=error)
        send(pipe, RankFailed(described(error), is_users=False))


def follow(pipe: Connection, executor: LocalExecutor, links: Communicator) -> None:
    """Do what the first rank does.

    Where a step has failed, nothing is done until the first rank has asked how. Where a collective has, that is said at
    once: it is not this rank that others wait for.

    Raises:
        EOFError: It has ended.
    """
    failure: str | None = None
    while True:
        command = next_command(pipe)
        match command:
            case Launch() | Choose() | Read():
                if failure is None:
                    failure = _failure_of(command, executor)
                    if links.is_broken:
                        send(pipe, Done(failure))
                        continue
                if isinstance(command, Read):
                    send(pipe, Done(failure))
            case Settle():
                send(pipe, Done(failure))
                failure = None
            case Prepare(decode, prefill):
                executor.prepare(decode or prefill)
                send(pipe, Done())
            case Ping():
                send(pipe, Done())
            case StartProfile() | StopProfile():
                send(pipe, _profiled(command, executor))
            case _:
                raise RuntimeError(f"{type(command).__name__} is for ranks that start")


def _failure_of(command: Launch | Choose | Read, executor: LocalExecutor) -> str | None:
    try:
        match command:
            case Launch(step):
                executor.launch(step)
            case Choose(late, masks):
                if len(masks):
                    executor.masks(len(masks))[:] = masks
                executor.choose(late)
            case Read():
                executor.read()
    except StepError as failure:
        return failure.text
    return None


def _profiled(command: StartProfile | StopProfile, executor: LocalExecutor) -> Done:
    try:
        if isinstance(command, StopProfile):
            return Done(files=tuple(executor.stop_profile()))
        executor.start_profile(command.spec)
    except ProfileError as error:
        return Done(str(error))
    return Done()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
