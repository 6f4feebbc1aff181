"""Masks of states that were met before, kept in one block of memory."""

from __future__ import annotations

import numpy as np

from dovetail.sdk.masks import Words
from dovetail_grammar.json_states import Shared

MAX_BYTES = 32 * 1024 * 1024
"""Of all masks that are kept, with their owners; memory that was never needed takes none."""
OWNER_BYTES = 512
"""Of a mask's owner and the views that it has of the mask; measured."""


class KeptMasks:
    """S masks `[S, W]` of int32. Which are given up for others is chosen by CLOCK: those not asked for in a round.

    Source: F. J. Corbató, A Paging Experiment with the Multics System (1968).
    """

    def __init__(self, num_words: int) -> None:
        """`num_words`: W, of one mask."""
        self._rows = np.empty((max(1, MAX_BYTES // (4 * num_words + OWNER_BYTES)), num_words), dtype=np.int32)
        self._owners: list[Shared] = []
        self._hand = 0

    def keep(self, shared: Shared, line: Words) -> None:
        """Keep a copy of a state's mask."""
        owners = self._owners
        if len(owners) < len(self._rows):
            shared.slot = len(owners)
            owners.append(shared)
        else:
            while owners[self._hand].is_used:
                owners[self._hand].is_used = False
                self._hand = (self._hand + 1) % len(owners)
            owners[self._hand].slot, owners[self._hand].line, owners[self._hand].bits = -1, None, None
            shared.slot, owners[self._hand] = self._hand, shared
            self._hand = (self._hand + 1) % len(owners)
        shared.line = self._rows[shared.slot]
        shared.line[:] = line
        shared.bits = shared.line.data.cast("B")
