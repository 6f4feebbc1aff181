"""`Executor`: what an engine asks of its devices, whether they are in its process or not."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from dovetail.messages import ProfileSpec
from dovetail.messages.step import ExecutorInfo, GraphKey, PrepareResult, StepInput, StepLate, StepOutput


class StepError(Exception):
    """A step could not be computed; the next one may. `is_memory`: memory ran out."""

    def __init__(self, text: str, *, is_memory: bool) -> None:
        """`text` is one line."""
        super().__init__(text)
        self.text, self.is_memory = text, is_memory

    @classmethod
    def of(cls, error: Exception, *, is_memory: bool) -> StepError:
        """Tell of what was raised."""
        return cls(f"{type(error).__name__}: {error}".splitlines()[0][:200], is_memory=is_memory)


class ProfileError(Exception):
    """A profile could not be recorded or written; steps are not concerned."""


class Executor(Protocol):
    """Computes steps, at most one ahead of the one that is read. Called by the engine's thread only.

    A step is launched, then chosen if a row of it waits, then the next one is launched; it is read before or after
    that. Whatever else than a `StepError` is raised means that nothing can be computed any more.
    """

    @property
    def info(self) -> ExecutorInfo:
        """Facts, as of now."""
        ...

    @property
    def progress(self) -> int:
        """What grows while a step is computed, by its layers. Any thread may ask."""
        ...

    def launch(self, step: StepInput) -> None:
        """Start a step. What it says of rows and pages holds even if the step itself fails.

        Raises:
            StepError: It could not be started, and will not be read.
        """

    def masks(self, num: int) -> npt.NDArray[np.int32]:
        """Lend memory for `num` masks `[num, ceil(V / 32)]` of the step that was launched last, until the next call."""
        ...

    def choose(self, late: StepLate) -> None:
        """Draw the tokens that had to wait.

        Raises:
            StepError: That failed, and the step will not be read.
        """

    def is_computing(self) -> bool:
        """Whether the device is still at the step that was launched last, where a row of it waits."""
        ...

    def read(self) -> StepOutput:
        """Wait for the oldest step that has not been read.

        Raises:
            StepError: It failed after all.
        """
        ...

    def prepare(self, key: GraphKey | None = None) -> PrepareResult:
        """Capture a graph, or whatever comes next in its own list; between steps, a fraction of a second or a few."""
        ...

    def check(self) -> None:
        """Look after devices that have nothing to do; called between steps.

        Raises:
            DovetailError: Nothing can be computed any more.
        """

    def device_memory(self) -> tuple[int, int]:
        """Return the bytes in use on the first rank's device, by whatever process, and all of them; 0, 0 on the CPU."""
        ...

    def start_profile(self, spec: ProfileSpec) -> None:
        """Record what is computed from now on, on every rank.

        Raises:
            ProfileError: It cannot be recorded.
        """

    def stop_profile(self) -> list[str]:
        """Write what was recorded, a file for each rank, and return their paths.

        Raises:
            ProfileError: It cannot be written.
        """
        ...

    def close(self) -> None:
        """End what it has started beside this process."""
