"""What is prepared while no request is served: decode and prefill graphs, and the kernels of eager steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Chore(Protocol):
    """Something that is prepared piece by piece."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to prepare."""
        ...

    def run_next(self) -> None:
        """Prepare the next piece: a fraction of a second, or a few seconds where kernels have to be compiled."""
        ...


class Chores:
    """Does one piece at a time, of each chore in turn: a server that is soon busy has some of everything."""

    def __init__(self, chores: Sequence[Chore]) -> None:
        """They may be complete already."""
        self._left = list(chores)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to prepare."""
        return all(chore.is_complete for chore in self._left)

    @torch.inference_mode()
    def do_next(self) -> None:
        """Prepare one piece."""
        self._left = [chore for chore in self._left if not chore.is_complete]
        if self._left:
            chore = self._left.pop(0)
            self._left.append(chore)
            chore.run_next()
