"""`GroupExecutor`: several ranks compute one model together, this process and one more for each.

The first rank alone talks to the engine. It sends every command to the others, does it, and waits until they have: so
all do the same in one order, which sums over ranks need. A step that fails on all of them is one that failed; where
some fail and others do not, or one ends or hangs, nothing can be computed any more, and the engine is started anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dovetail.errors import ConfigError, DovetailError
from dovetail.executor.local import LocalExecutor
from dovetail.executor.rank_messages import (
    Answer,
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
    next_answer,
    send,
)
from dovetail.messages import ProfileSpec
from dovetail.messages.executor import ProfileError, StepError
from dovetail.messages.step import ExecutorInfo, GraphKey, Prepared, StepInput, StepLate, StepOutput
from dovetail.plugins import LoadedPlugins
from dovetail.runtime.ranks import GlooCommunicator, Rank, parallel_of
from dovetail.settings import EngineSettings

T = TypeVar("T")
LOAD_S = 1800.0
"""What a rank may take to load its share."""
STEP_S = 60.0
"""What a step may take on one rank longer than on another, and a sum on all."""
END_S = 5.0


class RankError(DovetailError):
    """A rank has ended, hangs, or does not what the others do: nothing can be computed any more."""


class Follower(Protocol):
    """A started rank: a process, or in tests a thread."""

    def end(self, timeout_s: float) -> None:
        """Wait until it has ended; end it then."""
        ...


class ProcessFollower:
    """A rank in a process of its own, which has this end of a pipe."""

    def __init__(self, pipe: Connection) -> None:
        """Start it."""
        command = [sys.executable, "-m", "dovetail.executor.rank_main", str(pipe.fileno())]
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[pipe.fileno()], env=environment)
        pipe.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def end(self, timeout_s: float) -> None:
        """See `Follower`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class GroupExecutor:
    """See `Executor`."""

    def __init__(
        self,
        settings: EngineSettings,
        plugins: LoadedPlugins,
        start: Callable[[Connection], Follower] = ProcessFollower,
    ) -> None:
        """Load the model on every rank: on this one first, which says what fits.

        Args:
            settings: `tensor_parallel_size` ranks.
            plugins: Of this process; the others load the same plan.
            start: Starts a rank at the other end of a pipe.

        Raises:
            ConfigError: The settings, the model or a plugin is at fault, or the ranks cannot divide the model.
        """
        size = settings.tensor_parallel_size
        sums = self._sums = GlooCommunicator(0, size)
        self.local = LocalExecutor(settings, plugins, Rank(parallel_of(settings, 0, sums)))
        self.followers: list[Follower] = []
        self._pipes: list[Connection] = []
        self._lent: npt.NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)
        self._folder = tempfile.mkdtemp(prefix="dovetail-ranks-")
        try:
            self._start(settings, plugins, start)
            meeting = Path(self._folder) / "meeting"
            self._together(Connect(str(meeting), STEP_S), lambda: sums.connect(meeting, STEP_S))
        except BaseException:
            self.close()
            raise

    def _start(self, settings: EngineSettings, plugins: LoadedPlugins, start: Callable[[Connection], Follower]) -> None:
        size, plan = settings.tensor_parallel_size, self.local.runner.memory_plan
        for rank in range(1, size):
            pipe, other = Pipe()
            self._pipes.append(pipe)
            self.followers.append(start(other))
            self._tell(
                rank - 1,
                StartRank(
                    settings=EngineSettings.model_validate(
                        settings.model_dump(include=set(EngineSettings.model_fields))
                    ).model_dump(mode="json"),
                    plan=plugins.plan,
                    log_level=logging.getLogger("dovetail").getEffectiveLevel(),
                    rank=rank,
                    size=size,
                    memory=plan,
                ),
            )
        for at in range(size - 1):
            self._answer(at, LOAD_S)

    @property
    def info(self) -> ExecutorInfo:
        """See `Executor`; weights and cache are those of this rank."""
        return self.local.info

    def launch(self, step: StepInput) -> None:
        """See `Executor`."""
        self._together(Launch(step), lambda: self.local.launch(step))

    def masks(self, num: int) -> npt.NDArray[np.int32]:
        """See `Executor`."""
        self._lent = self.local.masks(num)
        return self._lent

    def choose(self, late: StepLate) -> None:
        """See `Executor`."""
        num = int((late.mask_of >= 0).sum())
        self._together(Choose(late, self._lent[:num]), lambda: self.local.choose(late))

    def is_computing(self) -> bool:
        """See `Executor`."""
        return self.local.is_computing()

    def read(self) -> StepOutput:
        """See `Executor`."""
        return self._together(Read(), self.local.read)

    def prepare(self, key: GraphKey | None = None) -> Prepared:
        """See `Executor`; on the CPU there is nothing to prepare."""
        return self.local.prepare(key)

    def start_profile(self, spec: ProfileSpec) -> None:
        """See `Executor`. Where one rank cannot, none does."""
        try:
            self._profile(StartProfile(spec), lambda: self._start_own(spec))
        except ProfileError:
            with contextlib.suppress(ProfileError):
                self.stop_profile()
            raise

    def _start_own(self, spec: ProfileSpec) -> list[str]:
        self.local.start_profile(spec)
        return []

    def stop_profile(self) -> list[str]:
        """See `Executor`."""
        return self._profile(StopProfile(), self.local.stop_profile)

    def _profile(self, command: Command, work: Callable[[], list[str]]) -> list[str]:
        """Do it on all ranks; one that fails alone is no reason to end.

        Raises:
            ProfileError: It failed somewhere.
            RankError: A rank has ended.
        """
        for at in range(len(self._pipes)):
            self._tell(at, command)
        failures: list[str] = []
        files: list[str] = []
        try:
            files += work()
        except ProfileError as error:
            failures.append(str(error))
        for at in range(len(self._pipes)):
            answer = self._hear(at, STEP_S)
            if isinstance(answer, Done):
                files += answer.files
                failures += [] if answer.failure is None else [f"rank {at + 1}: {answer.failure}"]
        if failures:
            raise ProfileError("; ".join(failures))
        return files

    def close(self) -> None:
        """End the other ranks."""
        for pipe in self._pipes:
            pipe.close()
        for follower in self.followers:
            follower.end(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _together(self, command: Command, work: Callable[[], T]) -> T:
        """Do something on all ranks.

        Raises:
            StepError: It failed on all of them.
            RankError: A rank has ended, or failed alone.
        """
        for at in range(len(self._pipes)):
            self._tell(at, command)
        failure: StepError | None = None
        try:
            result = work()
        except StepError as error:
            failure = error
        if failure is not None and self._sums.is_broken:
            raise RankError(f"ranks came apart: {failure.text}") from failure
        failed = [self._answer(at, STEP_S) for at in range(len(self._pipes))]
        if failure is None and not any(failed):
            return result
        if failure is not None and all(failed):
            raise failure
        told = [None if failure is None else failure.text, *failed]
        raise RankError(f"ranks came apart: {_list(told)}")

    def _tell(self, at: int, command: Command) -> None:
        try:
            send(self._pipes[at], command)
        except OSError as error:
            raise RankError(f"rank {at + 1} has ended") from error

    def _hear(self, at: int, timeout_s: float) -> Answer:
        """Wait for a rank.

        Raises:
            RankError: It has ended, or does not answer.
        """
        try:
            if not self._pipes[at].poll(timeout_s):
                raise RankError(f"rank {at + 1} has not answered for {timeout_s:g} s")
            return next_answer(self._pipes[at])
        except (EOFError, OSError) as error:
            raise RankError(f"rank {at + 1} has ended") from error

    def _answer(self, at: int, timeout_s: float) -> str | None:
        """Wait for a rank; returns how it failed, if it did."""
        match self._hear(at, timeout_s):
            case Refused(text, is_users):
                raise ConfigError(text) if is_users else RankError(f"rank {at + 1}: {text}")
            case Done(failure):
                return failure
            case Ready():
                return None


def _list(failures: Sequence[str | None]) -> str:
    return "; ".join(f"rank {rank}: {text or 'no error'}" for rank, text in enumerate(failures))
