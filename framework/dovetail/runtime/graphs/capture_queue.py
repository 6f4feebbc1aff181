"""What is prepared while no request is served: decode and prefill graphs, and the kernels of eager steps."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from tqdm import tqdm

from dovetail.messages.step import DecodeGraph, PrefillGraph

logger = logging.getLogger(__name__)


class CaptureTask(Protocol):
    """Something that is prepared piece by piece."""

    @property
    def num_left(self) -> int:
        """Pieces that are left."""
        ...

    def rehearse(self) -> None:
        """Launch every kernel of all pieces: they are collected, not run, and compiled before the first piece is."""

    def run_next(self) -> None:
        """Prepare the next piece: a fraction of a second, or a few seconds where kernels have to be compiled."""


Key = TypeVar("Key", DecodeGraph, PrefillGraph)
Captured = TypeVar("Captured")


class GraphSet(ABC, Generic[Key, Captured]):
    """Graphs of one kind, as a task: the first that is missing is captured next.

    Attributes:
        keys: Those that may be captured, in the order in which `run_next` does.
    """

    keys: list[Key]
    _captured: dict[Key, Captured]

    @property
    def num_left(self) -> int:
        """Graphs that are not captured yet."""
        return len(self.keys) - len(self._captured)

    @property
    def captured(self) -> list[Key]:
        """Those that are there."""
        return list(self._captured)

    def run_next(self) -> None:
        """Capture one that is missing, while the engine has nothing else to do."""
        missing = [key for key in self.keys if key not in self._captured]
        if missing:
            self._capture(missing[0])

    def capture(self, key: Key) -> None:
        """Capture one under load; where there is no memory for it, it is not tried again."""
        try:
            self._capture(key)
        except torch.OutOfMemoryError as error:
            self.keys.remove(key)
            logger.warning("No memory for a %s (%s)", key, str(error).splitlines()[0])

    @abstractmethod
    def _capture(self, key: Key) -> object:
        """Capture one."""


class CaptureQueue:
    """Does one piece at a time, of each task in turn: a server that is soon busy has some of everything."""

    def __init__(self, tasks: Sequence[CaptureTask]) -> None:
        """They may be complete already."""
        self._left = list(tasks)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to prepare."""
        return self.num_left == 0

    @property
    def num_left(self) -> int:
        """Pieces that are left."""
        return sum(task.num_left for task in self._left)

    @torch.inference_mode()
    def do_next(self) -> None:
        """Prepare one piece."""
        self._left = [task for task in self._left if task.num_left]
        if self._left:
            task = self._left.pop(0)
            try:
                task.run_next()
            except torch.OutOfMemoryError as error:  # what is there serves all the same
                logger.warning("Out of memory while preparing; the rest is left out (%s)", str(error).splitlines()[0])
                return
            self._left.append(task)

    def do_some(self, seconds: float) -> None:
        """Prepare pieces while that has taken no longer; all of them, where kernels were compiled before.

        With a progress bar.
        """
        started = time.perf_counter()
        with tqdm(total=self.num_left, desc="Preparing graphs and kernels", unit="step") as bar:
            while not self.is_complete and time.perf_counter() - started <= seconds:
                before = self.num_left
                self.do_next()
                bar.update(before - self.num_left)
        logger.info(
            "Prepared graphs and kernels in %.1f s; %d pieces are left for idle moments.",
            time.perf_counter() - started,
            self.num_left,
        )
