"""`GroupExecutor`: several ranks compute one model together, this process and one more for each.

The first rank alone talks to the engine. It sends every command to the others and does it, so all do the same in one
order, which collectives need; it waits for them where it reads what came of a step. A step that fails on all of them is
one that failed; where some fail and others do not, or one ends or hangs, nothing can be computed any more, and the
engine is started anew.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dovetail.base.distribution import DISTRIBUTION
from dovetail.base.settings import EngineSettings
from dovetail.contracts.errors import ConfigError
from dovetail.executor.followers import Follower, ProcessFollower, RankError, RankFollowers
from dovetail.executor.local import LocalExecutor
from dovetail.executor.rank_messages import (
    Built,
    Choose,
    Command,
    Connect,
    Launch,
    Prepare,
    Read,
    SetMemoryPlan,
    Settle,
    StartProfile,
    StartRank,
    StopProfile,
    WeightsLoaded,
)
from dovetail.messages import KernelUse, ProfileSpec
from dovetail.messages.executor import ProfileError, StepError
from dovetail.messages.step import DecodeGraph, GraphKey, PrepareResult, StepInput, StepLate, StepOutput
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.kinds import KINDS
from dovetail.runtime.device.devices import find_device
from dovetail.runtime.memory.checks import check_equal
from dovetail.runtime.memory.plan import DeviceBytes, MemoryPlan
from dovetail.runtime.ranks import Rank, communicator, parallel_of
from dovetail.runtime.start.capture import start_seconds

T = TypeVar("T")

LOAD_S = 1800.0
"""What a rank may take to load its share."""
CONNECT_S = 120.0
"""What it may take until all have met."""
STEP_S = 60.0
"""What a step may take on one rank longer than on another, and a collective on all, unless something else is said."""
LOOK_S = 0.05


class GroupExecutor(LocalExecutor):
    """The first rank: does what a local one does, and has all others do the same."""

    def __init__(
        self,
        settings: EngineSettings,
        plugins: LoadedPlugins,
        start: Callable[[Connection], Follower] = ProcessFollower,
        limit_s: float = STEP_S,
    ) -> None:
        """Load the model on all ranks at once.

        Args:
            settings: `tensor_parallel_size` ranks.
            plugins: Of this process; the others load the same plan.
            start: Starts a rank at the other end of a pipe.
            limit_s: For so long a rank may keep the others waiting.

        Raises:
            ConfigError: The settings, the model or a plugin is at fault, or the ranks cannot divide the model.
        """
        self._settings, self._plugins = settings, plugins
        self.attention: tuple[tuple[str, str], ...] = ()  # see `Meeting`
        self.kernels: tuple[KernelUse, ...] = ()
        self._lent: npt.NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)
        self._folder = tempfile.mkdtemp(prefix="dovetail-ranks-")
        self._ranks = RankFollowers(start, limit_s)
        self._links = communicator(settings, 0, find_device(settings, plugins))
        try:
            super().__init__(settings, plugins, Rank(parallel_of(settings, self._links), self, self._links))
            self._ranks.all_done(LOAD_S)
            self._prepare_some()
        except BaseException:
            self.close()
            raise

    @property
    def followers(self) -> list[Follower]:
        """The further ranks."""
        return self._ranks.all

    # ---- starting, as `Meeting`

    def built(self, device: DeviceBytes) -> None:
        """Start the others, and see that they are what this rank is; see `Meeting`."""
        names = set(EngineSettings.model_fields)
        plain = EngineSettings.model_validate(self._settings.model_dump(include=names)).model_dump(mode="json")
        level = logging.getLogger("dovetail").getEffectiveLevel()
        for _ in range(1, self._settings.tensor_parallel_size):
            rank = self._ranks.start()
            start = StartRank(
                settings=plain,
                plan=self._plugins.plan,
                log_level=level,
                rank=rank,
                attention=self.attention,
                kernels=self.kernels,
            )
            self._ranks.send_to_rank(rank, start)
        mine, free = about(self._plugins, device), [(device.name, device.free)]
        for rank in self._ranks.ranks:
            answer = self._ranks.hear(rank, LOAD_S)
            if isinstance(answer, Built):
                check_same(mine, answer, rank)
                free.append((answer.device, answer.free))
        if device.kind != "cpu":
            check_equal(free)

    def loaded(self, left: int, plan: Callable[[int], MemoryPlan]) -> MemoryPlan:
        """Plan for the rank that has least; see `Meeting`."""
        answers = [self._ranks.hear(rank, LOAD_S) for rank in self._ranks.ranks]
        found = plan(min([left, *(answer.left for answer in answers if isinstance(answer, WeightsLoaded))]))
        self._ranks.send(SetMemoryPlan(found))
        return found

    def connect(self) -> None:
        """Meet all others; see `Meeting`."""
        meeting, limit_s = Path(self._folder) / "meeting", self._ranks.limit_s
        self._ranks.all_done(LOAD_S)  # or all would wait in a collective for one that has ended
        self._ranks.send(Connect(str(meeting), limit_s))
        try:
            self._links.connect(meeting, CONNECT_S, limit_s)
        except RuntimeError as error:
            raise self._ranks.failed_rank(str(error)) from error

    def _prepare_some(self) -> None:
        """Prepare what is not needed at once, for a while: one rank's clock decides for all."""
        started, most_s = time.monotonic(), start_seconds(self._settings)
        left = self.info.prepared.num_left
        while left and time.monotonic() - started < most_s:
            left = self.prepare().num_left

    # ---- steps

    def launch(self, step: StepInput) -> None:
        """See `Executor`."""
        self._ranks.send(Launch(step))
        self._together(partial(super().launch, step))

    def masks(self, num: int) -> npt.NDArray[np.int32]:
        """See `Executor`."""
        self._lent = super().masks(num)
        return self._lent

    def choose(self, late: StepLate) -> None:
        """See `Executor`."""
        num = int((late.mask_of >= 0).sum())
        self._ranks.send(Choose(late, self._lent[:num]))
        self._together(partial(super().choose, late))

    def read(self) -> StepOutput:
        """See `Executor`."""
        self._ranks.send(Read())
        self._wait_for_device()
        found = self._together(super().read, is_answered=True)
        failed = [done.failure for done in self._ranks.all_done()]
        if any(failed):
            raise RankError(f"ranks came apart: {_list([None, *failed])}")
        return found

    def prepare(self, key: GraphKey | None = None) -> PrepareResult:
        """See `Executor`."""
        self._ranks.send(Prepare(key) if isinstance(key, DecodeGraph) else Prepare(prefill=key))
        found = super().prepare(key)
        self._ranks.all_done()
        return found

    def check(self) -> None:
        """See `Executor`."""
        self._ranks.check()

    def _together(self, work: Callable[[], T], *, is_answered: bool = False) -> T:
        """Do what the others were told to do, and answer if it `is_answered`.

        Raises:
            StepError: It failed on all of them.
            RankError: A rank has ended, or some failed and others did not.
        """
        try:
            return work()
        except StepError as failure:
            if self._links.is_broken:
                raise self._ranks.failed_rank(failure.text) from failure
            self._ranks.send(Settle())
            if is_answered:
                self._ranks.all_done()
            failed = [done.failure for done in self._ranks.all_done()]
            if not all(failed):
                raise RankError(f"ranks came apart: {_list([failure.text, *failed])}") from failure
            raise

    def _wait_for_device(self) -> None:
        """Wait for what the next read waits for, and look after the others meanwhile.

        Raises:
            RankError: One has ended, or the device does not come to an end.
        """
        started = looked = time.monotonic()
        progress = self.progress
        while not self.is_readable():
            now = time.monotonic()
            if self.progress != progress:
                progress, started = self.progress, now
            if now - looked > LOOK_S:
                looked = now
                self._ranks.find_trouble()
                if now - started > self._ranks.limit_s:
                    raise self._ranks.failed_rank(f"the device has not computed a step for {now - started:.0f} s")
            time.sleep(0)

    # ---- profiles

    def start_profile(self, spec: ProfileSpec) -> None:
        """See `Executor`. Where one rank cannot, none does."""
        try:
            self._on_all(StartProfile(spec), partial(super().start_profile, spec))
        except ProfileError:
            with contextlib.suppress(ProfileError):
                self.stop_profile()
            raise

    def stop_profile(self) -> list[str]:
        """See `Executor`."""
        return self._on_all(StopProfile(), super().stop_profile)

    def _on_all(self, command: Command, work: Callable[[], list[str] | None]) -> list[str]:
        """Do it on all ranks; one that fails alone is no reason to end.

        Raises:
            ProfileError: It failed somewhere.
            RankError: A rank has ended.
        """
        self._ranks.send(command)
        failures: list[str] = []
        files: list[str] = []
        try:
            files += work() or []
        except ProfileError as error:
            failures.append(str(error))
        for rank, answer in enumerate(self._ranks.all_done(), 1):
            files += answer.files
            failures += [] if answer.failure is None else [f"rank {rank}: {answer.failure}"]
        if failures:
            raise ProfileError("; ".join(failures))
        return files

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.end()
        self._links.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def about(plugins: LoadedPlugins, device: DeviceBytes) -> Built:
    """Say what a rank is; all must be the same.

    Candidates of `auto` for attention are left out: the first rank tries more of them than the others, which take what
    it has chosen, and say so where they cannot.
    """
    versions = {(planned.kind, planned.qualified): planned.version for planned in plugins.plan.plugins}
    tried = {planned.qualified for planned in plugins.plan.of_kind("attention_backend") if not planned.requested}
    shared = [
        (kind, name, versions.get((kind, name), ""), state)
        for kind, name, state, _ in plugins.states()
        if {"engine", "worker"} <= set(KINDS[kind].roles) and not (kind == "attention_backend" and name in tried)
    ]
    return Built(
        version=version(DISTRIBUTION),
        plugins=tuple(sorted(shared)),
        device=device.name,
        free=device.free,
    )


def check_same(first: Built, other: Built, rank: int) -> None:
    """Refuse a rank that runs other code than the first.

    Raises:
        ConfigError: Naming what differs.
    """
    fix = "restart the server, so that all ranks load what is installed now"
    if first.version != other.version:
        raise ConfigError(f"rank {rank} runs dovetail {other.version}, rank 0 {first.version}; {fix}")
    if first.plugins == other.plugins:
        return
    mine, others = ({row[:2]: row[2:] for row in built.plugins} for built in (first, other))
    for kind, name in sorted(mine.keys() | others.keys()):
        here, there = mine.get((kind, name)), others.get((kind, name))
        if here != there:
            said = " and ".join(
                f"rank {at} has {'no such plugin' if row is None else ' '.join(filter(None, row))}"
                for at, row in ((0, here), (rank, there))
            )
            raise ConfigError(f"{kind} {name!r}: {said}; {fix}")


def _list(failures: Sequence[str | None]) -> str:
    return "; ".join(f"rank {rank}: {text or 'no error'}" for rank, text in enumerate(failures))
