"""Runs the vision tower on blank images before the engine is ready, so that no request waits for its kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch

from dovetail.contracts.errors import RequestError
from dovetail.contracts.processor import Arrays, ImageProcessor
from dovetail.runtime.device.row_images import RowImages

SIZES = ((64, 64), (512, 512), (520, 312))
"""Pixels of blank images: kernels differ by what multiples of 16 their numbers are."""


class TowerTrials:
    """A `CaptureTask`: one image at a time."""

    def __init__(self, images: RowImages, each: Iterable[Arrays]) -> None:
        """Run nothing yet. `each` are the arrays of images."""
        self._images, self._waiting = images, list(each)

    @property
    def num_left(self) -> int:
        """See `CaptureTask.num_left`."""
        return len(self._waiting)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """See `CaptureTask.rehearse`."""
        for arrays in self._waiting:
            self._images.encode(arrays)

    @torch.inference_mode()
    def run_next(self) -> None:
        """See `CaptureTask.run_next`."""
        self._images.encode(self._waiting.pop(0))


def blank_images(processor: ImageProcessor, max_patches: int) -> Iterator[Arrays]:
    """Yield the arrays of blank images, of the sizes that the processor takes; none where Pillow cannot be imported.

    Memory was planned for images of `max_patches`.
    """
    try:
        from PIL import Image
    except ImportError:  # a server without Pillow serves texts
        return
    for size in SIZES:
        with suppress(RequestError):
            if processor.layout(*size).num_patches <= max_patches:
                yield processor.process(Image.new("RGB", size))
