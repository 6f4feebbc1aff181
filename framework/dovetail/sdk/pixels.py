"""Resizing and cutting for image processors: Pillow resizes, in several threads where a process has them; same bits.

Pillow computes each channel of an image from that channel alone, and lets go of Python's lock meanwhile. Bands of rows
would not do: whether it resizes rows or columns first, and rounds between, depends on the sizes of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

MANY_THREADS = 4
"""For three channels, and for what else is done with an image meanwhile. On fewer cores one thread does all: several
take a tenth more processor time."""
MIN_PIXELS = 1 << 17
"""Resizing so many takes a millisecond or two, and threads a tenth of that."""
CHANNELS = 3
T = TypeVar("T")
R = TypeVar("R")


class PixelThreads:
    """Threads that work on one image.

    Attributes:
        number: How many: one does all where it is asked to. A process that sets more does not fork any more.
    """

    def __init__(self) -> None:
        self.number = 1
        self._executor: ThreadPoolExecutor | None = None

    def start(self, work: Callable[[T], R], item: T) -> Callable[[], R]:
        """Begin `work` in a thread; returns what waits for its result. Without threads it is done here and now."""
        if self.number > 1:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.number, thread_name_prefix="dovetail-pixels")
            try:
                return self._executor.submit(work, item).result
            except RuntimeError:  # the system has no room for another thread
                self.number = 1
        found = work(item)
        return lambda: found


THREADS = PixelThreads()
"""Those of this process."""


def resized(image: Image, size: tuple[int, int], resample: int) -> npt.NDArray[np.uint8]:
    """Return the pixels of `image.resize(size, resample)`, `[height, width, 3]` uint8, in any order of memory.

    Args:
        image: Of mode `RGB`.
        size: Width and height in pixels.
        resample: Pillow's number of the filter.
    """
    import numpy as np  # not at the top: a server of text sets the number of threads only

    if not _is_divided(image, size):
        return np.asarray(image if size == image.size else image.resize(size, resample))
    found = np.empty((CHANNELS, size[1], size[0]), np.uint8)
    _each_channel(image, size, resample, found.__setitem__)
    return np.moveaxis(found, 0, -1)


def resized_patches(
    image: Image, size: tuple[int, int], resample: int, patch: int, merge: int = 1
) -> npt.NDArray[np.uint8]:
    """Return `cut(resized(image, size, resample), patch, merge)`; a thread that resizes a channel also cuts it."""
    import numpy as np

    if not _is_divided(image, size):
        return cut(resized(image, size, resample), patch, merge)
    found = np.empty((size[0] // patch * (size[1] // patch), CHANNELS * patch * patch), np.uint8)
    _each_channel(image, size, resample, lambda channel, plane: _cut_channel(plane, found, channel, patch, merge))
    return found


def cut(pixels: npt.NDArray[np.uint8], patch: int, merge: int = 1) -> npt.NDArray[np.uint8]:
    """Cut images `[..., rows * patch, columns * patch, 3]` into patches `[N, 3 * patch * patch]`, row by row.

    A patch has its red values row by row, then the green and the blue ones.

    Args:
        pixels: In any order of memory; that of `resized` in several threads is the fastest.
        patch: Side of a patch in pixels.
        merge: The patches of a block of `merge` by `merge` stand behind one another; blocks stand row by row.
    """
    import numpy as np

    found = np.empty((pixels.size // (CHANNELS * patch * patch), CHANNELS * patch * patch), np.uint8)
    for channel in range(CHANNELS):
        _cut_channel(np.ascontiguousarray(pixels[..., channel]), found, channel, patch, merge)
    return found


def _cut_channel(
    plane: npt.NDArray[np.uint8], found: npt.NDArray[np.uint8], channel: int, patch: int, merge: int
) -> None:
    """Put a channel's values into patches."""
    high, wide = plane.shape[-2] // patch // merge, plane.shape[-1] // patch // merge
    run = f"V{patch}"  # a patch's row as one item: numpy copies items faster than as many single values
    blocks = found.view(run).reshape(-1, high, wide, merge, merge, CHANNELS, patch)
    rows = plane.view(run).reshape(-1, high, merge, patch, wide, merge)
    blocks[..., channel, :] = rows.transpose(0, 1, 4, 2, 5, 3)


def _is_divided(image: Image, size: tuple[int, int]) -> bool:
    """Whether a thread resizes each channel."""
    pixels = max(image.width * image.height, size[0] * size[1])
    return THREADS.number > 1 and size != image.size and pixels >= MIN_PIXELS


def _each_channel(
    image: Image, size: tuple[int, int], resample: int, use: Callable[[int, npt.NDArray[np.uint8]], None]
) -> None:
    """Have threads resize each channel, and use its pixels `[height, width]`."""
    import numpy as np

    def work(channel: int) -> None:
        use(channel, np.asarray(image.getchannel(channel).resize(size, resample)))

    for wait in [THREADS.start(work, channel) for channel in range(CHANNELS)]:
        wait()
