"""What is prepared while no request is served: decode and prefill graphs, and the kernels of eager steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from tqdm import tqdm

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
