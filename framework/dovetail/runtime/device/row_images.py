"""Images of running requests: what the vision tower made of them, and where their tokens stand in a step.

N tokens of a step that stand for images, T tokens of a step, S device rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.contracts.attention import ImageRows
from dovetail.contracts.errors import ModelError
from dovetail.contracts.processor import Arrays
from dovetail.messages.media import MediaSpan, read_arrays
from dovetail.messages.step import Admit, StepInput
from dovetail.runtime.device.upload import to_device, upload

Longs = npt.NDArray[np.int64]
Encode = Callable[[Mapping[str, Tensor]], Tensor]
"""The model's `VisionTower.encode`."""


@dataclass(frozen=True, slots=True)
class ImagePositions:
    """Rotary positions of a request with images.

    Attributes:
        prompt: `[3, P]` frame, row and column of each token of its prompt.
        delta: What is added to the place of each token behind it.
    """

    prompt: Longs
    delta: int

    @classmethod
    def of(cls, num_prompt: int, spans: Sequence[MediaSpan]) -> ImagePositions:
        """Number the tokens: text goes on behind the largest number of an image.

        Raises:
            ModelError: An image has breaks between its tokens, which no model with such positions has.
        """
        found = np.empty((3, num_prompt), np.int64)
        at = number = 0
        for span in spans:
            if span.num != prod(span.grid):
                raise ModelError(f"an image of {prod(span.grid)} embeddings has {span.num} tokens side by side")
            found[:, at : span.start] = np.arange(number, number + span.start - at)
            number += span.start - at
            at = span.start + span.num
            found[:, span.start : at] = number + np.indices(span.grid).reshape(3, -1)
            number += max(span.grid)
        found[:, at:] = np.arange(number, number + num_prompt - at)
        return cls(found, number - at)

    def between(self, start: int, end: int) -> Longs:
        """Return those of the tokens `start … end - 1`, `[3, end - start]`."""
        known = self.prompt[:, start:end]
        behind = np.arange(max(start, self.prompt.shape[1]), end) + self.delta
        return np.concatenate((known, np.broadcast_to(behind, (3, len(behind)))), 1)


class ImageTensors(NamedTuple):
    """Fields of `ForwardBatch`."""

    images: ImageRows | None = None
    spans: Tensor | None = None
    rope_positions: Tensor | None = None


NO_IMAGES = ImageTensors()


class RowImages:
    """Images of the requests in device rows, and the tower's output by digest.

    Attributes:
        deltas: `[S]` int64 on the device, `ImagePositions.delta` of each row; None where positions are plain.
    """

    def __init__(
        self, encode: Encode, num_rows: int, device: torch.device, *, has_sections: bool, has_spans: bool = False
    ) -> None:
        """No row has images.

        Args:
            encode: The model's.
            num_rows: S.
            device: The model's.
            has_sections: Rotary embeddings turn by three positions.
            has_spans: Tokens of an image see all of it.
        """
        self._encode, self._device, self._has_spans = encode, device, has_spans
        self.deltas = torch.zeros(num_rows, dtype=torch.int64, device=device) if has_sections else None
        self._known: Longs = np.zeros(num_rows, np.int64)
        self._media: dict[int, tuple[MediaSpan, ...]] = {}
        self._positions: dict[int, ImagePositions] = {}
        self._outputs: dict[bytes, Tensor] = {}

    def apply(self, step: StepInput) -> None:
        """Take what a step says of rows and images, and encode those that it names.

        Raises:
            RequestError: The arrays of an image cannot be read.
            ModelError: The tower returns something else than the image's grid says.
        """
        for row in (*step.cleared.tolist(), *(admit.row for admit in step.admit)):
            self._media.pop(row, None)
            self._positions.pop(row, None)
        for admit in step.admit:
            self._admit(admit)
        for digest in step.dropped:
            self._outputs.pop(digest, None)
        for span in step.encode:
            found = self.encode(read_arrays(span.file, span.arrays))
            if found.dim() != 3 or found.shape[1] != prod(span.grid):
                shape = list(found.shape)
                raise ModelError(f"encode returns a tensor {shape} for an image of {prod(span.grid)} embeddings")
            self._outputs[span.digest] = found

    def encode(self, arrays: Arrays) -> Tensor:
        """Return what the tower makes of an image's arrays."""
        given = {name: torch.from_numpy(one) for name, one in arrays.items()}
        # Small numbers stay on the host: a tower that had to read them from the device would wait for all before it.
        return self._encode(
            {name: to_device(one, self._device) if one.dtype == torch.uint8 else one for name, one in given.items()}
        )

    def _admit(self, admit: Admit) -> None:
        delta = 0
        if admit.media:
            self._media[admit.row] = admit.media
            if self.deltas is not None:
                self._positions[admit.row] = found = ImagePositions.of(admit.num_prompt, admit.media)
                delta = found.delta
        if self.deltas is not None and delta != self._known[admit.row]:
            self._known[admit.row] = delta
            rows = upload([admit.row], torch.int64, self._device)
            self.deltas.index_copy_(0, rows, upload([delta], torch.int64, self._device))

    def of(self, step: StepInput, positions: Longs, starts: Longs) -> ImageTensors:
        """Return what a step's batch has of images.

        Args:
            step: The step.
            positions: `[T]` places of its tokens.
            starts: First token of each of its rows; the end of the last.
        """
        here = [(i, row) for i, row in enumerate(step.rows.tolist()) if row in self._media]
        if not here:
            return NO_IMAGES
        places: list[Longs] = []
        parts: list[Tensor] = []
        turned, spans = np.tile(positions, (3, 1)), np.stack((positions, positions + 1), 1)
        for i, row in here:
            first, end = int(starts[i]), int(starts[i + 1])
            begin = int(positions[first])
            for span in self._media[row]:
                low, high = max(begin, span.start), min(begin + end - first, span.start + span.num)
                if low < high:
                    places.append(np.arange(low, high) - begin + first)
                    spans[places[-1]] = span.start, span.start + span.num
                    offset = span.first + low - span.start
                    parts.append(self._outputs[span.digest][:, offset : offset + high - low])
            if self.deltas is not None:
                turned[:, first:end] = self._positions[row].between(begin, begin + end - first)
        images = None
        if parts:
            images = ImageRows(self._sent(np.concatenate(places)), parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        return ImageTensors(
            images,
            self._sent(spans) if parts and self._has_spans else None,
            None if self.deltas is None else self._sent(turned),
        )

    def _sent(self, numbers: Longs) -> Tensor:
        return to_device(torch.from_numpy(numbers), self._device)
