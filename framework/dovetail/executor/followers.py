"""The further ranks as the first one sees them: started and ended together, and found when they end, stop or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar, Protocol

from dovetail.base.process_limits import ENGINE_ENVIRONMENT
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.executor.rank_messages import Answer, Command, Done, Ping, RankFailed, next_answer, send

END_S = 5.0
FAILED_RANK_S = 5.0
"""What ranks have to say that a collective failed for them, too, before those that say nothing are named."""
PING_S = 1.0


class RankError(DovetailError):
    """A rank has ended, hangs, or does not what the others do: nothing can be computed any more."""


class Follower(Protocol):
    """A started rank: a process, or in tests a thread."""

    @property
    def trouble(self) -> str:
        """What keeps it from answering, as far as the system knows: `was ended by SIGKILL`; empty if nothing does."""
        ...

    def end(self, timeout_s: float) -> None:
        """Wait until it has ended; end it then."""


class ProcessFollower:
    """A rank in a process of its own, which has this end of a pipe."""

    program: ClassVar[tuple[str, ...]] = ("-m", "dovetail.executor.rank_main")
    """Arguments of the interpreter, before the pipe's number."""

    def __init__(self, pipe: Connection) -> None:
        """Start it."""
        command = [sys.executable, *self.program, str(pipe.fileno())]
        environment = {**ENGINE_ENVIRONMENT, **os.environ}
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[pipe.fileno()], env=environment)
        pipe.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def trouble(self) -> str:
        """See `Follower`."""
        code = self._process.poll()
        if code is not None:
            return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with code {code}"
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""
        return "is stopped (SIGSTOP)" if state in "Tt" else ""

    def end(self, timeout_s: float) -> None:
        """See `Follower`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RankFollowers:
    """All of them, by their ranks 1, 2, …, and the pipes to them."""

    def __init__(self, start: Callable[[Connection], Follower], limit_s: float) -> None:
        """None is started; one that keeps the first rank waiting for longer than `limit_s` hangs."""
        self._start, self.limit_s = start, limit_s
        self._pipes: list[Connection] = []
        self.all: list[Follower] = []
        self._pinged: float | None = None
        self._waiting: set[int] = set()
        self._heard = time.monotonic()

    @property
    def ranks(self) -> range:
        """Of those that were started."""
        return range(1, len(self._pipes) + 1)

    def start(self) -> int:
        """Start one more; returns its rank.

        Raises:
            RankError: The system has no room for it.
        """
        try:
            pipe, other = Pipe()
            follower = self._start(other)
        except OSError as error:
            raise RankError(f"rank {len(self._pipes) + 1} could not be started: {error}") from error
        self._pipes.append(pipe)
        self.all.append(follower)
        return len(self._pipes)

    def send(self, command: Command) -> None:
        """Tell all.

        Raises:
            RankError: One has ended.
        """
        for rank in self.ranks:
            self.send_to_rank(rank, command)

    def send_to_rank(self, rank: int, command: Command) -> None:
        """Tell one.

        Raises:
            RankError: It has ended.
        """
        try:
            send(self._pipes[rank - 1], command)
        except OSError as error:
            raise self._lost(rank) from error

    def hear(self, rank: int, timeout_s: float | None = None) -> Answer:
        """Wait for a rank's answer.

        Raises:
            ConfigError: It was refused what it needs, for what its user said.
            RankError: It has ended, or does not answer.
        """
        self._drain_ping(rank)
        answer = self._next(rank, self.limit_s if timeout_s is None else timeout_s)
        if isinstance(answer, RankFailed):
            raise ConfigError(answer.text) if answer.is_users else RankError(f"rank {rank}: {answer.text}")
        self._heard = time.monotonic()
        return answer

    def done(self, rank: int, timeout_s: float | None = None) -> Done:
        """Wait until a rank has done what it was told.

        Raises:
            ConfigError: See `hear`.
            RankError: See `hear`.
        """
        answer = self.hear(rank, timeout_s)
        if not isinstance(answer, Done):
            raise RankError(f"rank {rank} says {type(answer).__name__} where it should be done")
        return answer

    def all_done(self, timeout_s: float | None = None) -> list[Done]:
        """Wait until all ranks have done what they were told, one after the other.

        Raises:
            ConfigError: See `hear`.
            RankError: See `hear`.
        """
        return [self.done(rank, timeout_s) for rank in self.ranks]

    def check(self) -> None:
        """Look after ranks that have nothing to do; between steps, as often as one likes.

        Raises:
            RankError: One has ended, or does not answer.
        """
        self.find_trouble()
        now = time.monotonic()
        if self._pinged is None:
            if now - self._heard >= PING_S:
                self.send(Ping())
                self._pinged, self._waiting = now, set(self.ranks)
            return
        for rank in list(self._waiting):
            if self._has_answer(rank):
                self._drain_ping(rank)
            elif now - self._pinged > self.limit_s:
                raise self._silent(rank, now - self._pinged)
        if not self._waiting:
            self._pinged, self._heard = None, now

    def find_trouble(self) -> None:
        """Name a rank that has ended.

        Raises:
            RankError: There is one.
        """
        for rank, follower in zip(self.ranks, self.all, strict=True):
            trouble = follower.trouble
            if trouble and "stopped" not in trouble:
                raise RankError(f"rank {rank} {trouble}")

    def failed_rank(self, why: str) -> RankError:
        """Name those to whom it is owed that a collective failed here: others say that it failed for them, too."""
        deadline = time.monotonic() + FAILED_RANK_S
        found = []
        for rank in self.ranks:
            follower = self.all[rank - 1]
            while not (trouble := follower.trouble) and time.monotonic() < deadline and not self._has_answer(rank):
                time.sleep(0.02)
            if trouble or not self._has_answer(rank):
                found.append(f"rank {rank} {trouble or 'does not answer'}")
                continue
            try:
                self._next(rank, 0)
            except RankError as lost:  # what there was to read was its end
                found.append(str(lost))
        return RankError("; ".join(found) if found else f"ranks came apart: {why}")

    def end(self) -> None:
        """End all, at once."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + END_S
        for follower in self.all:
            follower.end(max(0.0, deadline - time.monotonic()))

    def _drain_ping(self, rank: int) -> None:
        """A rank answers in order: first what it was asked while it had nothing to do."""
        if self._pinged is not None and rank in self._waiting:
            self._next(rank, self.limit_s)
            self._waiting.discard(rank)
            if not self._waiting:
                self._pinged = None

    def _has_answer(self, rank: int) -> bool:
        try:
            return self._pipes[rank - 1].poll(0)
        except OSError:
            return True  # it has ended, and reading says so

    def _next(self, rank: int, timeout_s: float) -> Answer:
        try:
            if not self._pipes[rank - 1].poll(timeout_s):
                raise self._silent(rank, timeout_s)
            return next_answer(self._pipes[rank - 1])
        except (EOFError, OSError) as error:
            raise self._lost(rank) from error

    def _lost(self, rank: int) -> RankError:
        for _ in range(50):  # the pipe is closed a moment before the process has ended
            if trouble := self.all[rank - 1].trouble:
                return RankError(f"rank {rank} {trouble}")
            time.sleep(0.01)
        return RankError(f"rank {rank} has ended")

    def _silent(self, rank: int, passed_s: float) -> RankError:
        trouble = self.all[rank - 1].trouble
        return RankError(f"rank {rank} {trouble or 'hangs'}: it has not answered for {passed_s:.0f} s")
