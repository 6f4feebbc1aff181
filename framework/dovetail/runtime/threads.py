"""How many threads compute a step on a CPU."""

from __future__ import annotations

import torch

MANY_TOKENS = 128
"""Tokens from which a step is worth all threads, however small its matrices."""


class StepThreads:
    """Sets torch's number of threads for each step; the threads themselves stay.

    Args:
        few: For steps of few tokens.
        many: For steps of `MANY_TOKENS` and more.
    """

    def __init__(self, few: int, many: int) -> None:
        self.few, self.many = few, many
        self.begin(0)

    def begin(self, num_tokens: int) -> None:
        """Set the number for a step of `num_tokens`."""
        wanted = self.many if num_tokens >= MANY_TOKENS else self.few
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
