"""What is prepared while no request is served: decode graphs, and the kernels of eager steps."""

from __future__ import annotations

import torch

from dovetail.runtime.graphs import DecodeGraphs
from dovetail.runtime.warm_up import EagerWarmUp


class Chores:
    """Does one thing at a time, the two kinds in turn: a server that is soon busy has some of both."""

    def __init__(self, graphs: DecodeGraphs | None, warm_up: EagerWarmUp | None) -> None:
        """Either may be missing, or complete already."""
        self._graphs, self._warm_up = graphs, warm_up
        self._has_captured = True

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to prepare."""
        return not (self._can_capture or self._can_warm_up)

    @torch.inference_mode()
    def do_next(self) -> None:
        """Prepare one thing: a fraction of a second, or a few seconds where kernels have to be compiled."""
        if self._warm_up is not None and self._can_warm_up and (self._has_captured or not self._can_capture):
            self._warm_up.run_next()
            self._has_captured = False
        elif self._graphs is not None:
            self._graphs.capture_next()
            self._has_captured = True

    @property
    def _can_capture(self) -> bool:
        return self._graphs is not None and not self._graphs.is_complete

    @property
    def _can_warm_up(self) -> bool:
        return self._warm_up is not None and not self._warm_up.is_complete
