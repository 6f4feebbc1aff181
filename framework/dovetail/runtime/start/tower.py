"""Runs the vision tower on blank images before the engine is ready.

On a GPU, so that no request waits for its kernels. On a CPU, to know how large an image may be: an engine is started
again that computes one layer for too long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from time import perf_counter

import torch

from dovetail.contracts.errors import RequestError
from dovetail.contracts.processor import Arrays, ImageProcessor
from dovetail.runtime.device.row_images import RowImages

SIZES = ((64, 64), (512, 512), (520, 312))
"""Pixels of blank images: kernels differ by what multiples of 16 their numbers are."""
TIMED = ((64, 64), (64, 64), (256, 256), (512, 512))
"""Those of images that are timed, until one takes long enough to tell; the first has weights read from the disk."""
ENOUGH_S = 0.5
TOO_MUCH_S = 5.0
"""Of the first one: no further one is tried."""
MOST_S = 15.0
"""Of a layer, where nobody gives another bound: half of what `--engine-hang-timeout` is by default."""
logger = logging.getLogger("dovetail.engine")


class TowerTrials:
    """A `CaptureTask`: one image at a time."""

    def __init__(self, images: RowImages, each: Iterable[tuple[Arrays, int]]) -> None:
        """Run nothing yet. `each` are the arrays of images, and their patches."""
        self._images, self._waiting = images, [arrays for arrays, _ in each]

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


def timed_patches(
    images: RowImages,
    processor: ImageProcessor,
    width: int,
    max_patches: int,
    layers: Callable[[], int],
    clock: Callable[[], float] = perf_counter,
) -> int:
    """Return for how many patches a layer of the tower takes 15 s, by smaller images; 0 where there is nothing to try.

    An image of as many patches as the smallest is always possible. A tower's work for N patches grows as `N (6 H + N)`:
    a layer has about 12 H² weights, and attention multiplies H numbers twice for each pair of patches.

    Args:
        images: Runs the tower.
        processor: The model's.
        width: H.
        max_patches: Memory was planned for so many.
        layers: Counts those that were computed.
        clock: Returns seconds.
    """
    took, least, num, num_layers = 0.0, 0, 0, 1
    for arrays, patches in blank_images(processor, max_patches, TIMED):
        if took > (ENOUGH_S if least and num else TOO_MUCH_S):
            break
        began, before = clock(), layers()
        with torch.inference_mode():
            images.encode(arrays)
        took, num, least, num_layers = clock() - began, patches, least or patches, max(layers() - before, 1)
    if not num:
        return 0
    work = num * (6 * width + num) * MOST_S * num_layers / max(took, 1e-9)
    most = max(least, int((9 * width**2 + work) ** 0.5) - 3 * width)
    if most >= max_patches:
        return max_patches
    text = "Images may have %s patches here: a layer of the vision tower then takes about %g s, and all wait for %d. "
    text += "--max-image-patches sets another number, up to %s."
    logger.info(text, f"{most:,}", MOST_S, num_layers, f"{max_patches:,}")
    return most


def blank_images(
    processor: ImageProcessor, max_patches: int, sizes: Iterable[tuple[int, int]] = SIZES
) -> Iterator[tuple[Arrays, int]]:
    """Yield the arrays of blank images, and their patches, of the `sizes` that the processor takes.

    Memory was planned for images of `max_patches`. There are none where Pillow cannot be imported.
    """
    try:
        from PIL import Image
    except ImportError:  # a server without Pillow serves texts
        return
    for size in sizes:
        with suppress(RequestError):
            if (num := processor.layout(*size).num_patches) <= max_patches:
                yield processor.process(Image.new("RGB", size)), num
