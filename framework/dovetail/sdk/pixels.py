"""Resizing for image processors: Pillow's own, by several threads where a process has them, with the same bits.

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

    if size == image.size:
        return np.asarray(image)
    if THREADS.number < 2 or max(image.width * image.height, size[0] * size[1]) < MIN_PIXELS:
        return np.asarray(image.resize(size, resample))
    found = np.empty((CHANNELS, size[1], size[0]), np.uint8)

    def resize(channel: int) -> None:
        found[channel] = np.asarray(image.getchannel(channel).resize(size, resample))

    for wait in [THREADS.start(resize, channel) for channel in range(CHANNELS)]:
        wait()
    return np.moveaxis(found, 0, -1)
