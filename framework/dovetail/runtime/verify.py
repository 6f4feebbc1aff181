"""Which of a step's drafts hold: those that were drawn, up to the first that was not.

At every place a token is drawn as it would be without drafts, with that place's own key, so what a request says does
not depend on what was guessed. Device and host come to the same answer from the same tokens, each by itself: the device
goes on from it at once, the host learns it when it reads them.

R rows with P places, W most places of a row; a row's first place is behind what is known, each other behind a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.messages.step import StepInput
from dovetail.runtime.device.upload import to_device
from dovetail.runtime.graphs.batch import drafts_behind


@dataclass(frozen=True, slots=True)
class Drafts:
    """What is to be compared.

    Attributes:
        at: `[R]` which of the step's rows these are.
        behind: `[P]` int64, the draft that stands behind each place, `NO_DRAFT` for none.
        places: `[R, W]` int64, the places of each row; its last one again where it has fewer.
        num: `[R]` int64, drafts of each row.
    """

    at: npt.NDArray[np.int64]
    behind: Tensor
    places: Tensor
    num: Tensor

    @classmethod
    def of(cls, step: StepInput, rows: npt.NDArray[np.int64], device: torch.device | None = None) -> Drafts:
        """Look them up in a step, for the places of these rows `[P]`; ascending, with all places of each row."""
        num_drafts = np.zeros(len(step.rows), np.int32) if step.num_drafts is None else step.num_drafts
        at, first = np.unique(rows, return_index=True)
        num = num_drafts[at].astype(np.int64)
        behind = drafts_behind(step, rows)
        places = first[:, None] + np.minimum(np.arange(int(num.max(initial=0)) + 1), num[:, None])
        sent = [torch.from_numpy(array) for array in (behind, places, num)]
        if device is not None:
            sent = [to_device(tensor, device) for tensor in sent]
        return cls(at, *sent)

    def num_held(self, drawn: Tensor) -> Tensor:
        """Return how many drafts of each row hold, `[R]` int64, by the tokens drawn at all places `[P]`."""
        held = (drawn == self.behind)[self.places]
        return held.to(torch.int64).cumprod(dim=1).sum(dim=1)

    def last(self, drawn: Tensor, held: Tensor) -> Tensor:
        """Return the last token that each row gets, `[R]`: the one behind its last draft that holds."""
        return drawn[self.places.gather(1, held[:, None])[:, 0]]
