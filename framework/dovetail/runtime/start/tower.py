"""Runs the vision tower on blank images before the engine is ready, so that no request waits for its kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.base.model_files import object_if_there
from dovetail.contracts.errors import RequestError
from dovetail.contracts.processor import Arrays, ImageProcessor
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import import_planned
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.device.row_images import RowImages

SIZES = ((64, 64), (512, 512), (520, 312))
"""Pixels of blank images: kernels differ by what multiples of 16 their numbers are."""


class TowerTrials:
    """A `CaptureTask`: one image at a time."""

    def __init__(self, images: RowImages, each: Sequence[Arrays]) -> None:
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


def blank_images(plugins: LoadedPlugins, folder: ModelFolder) -> list[Arrays]:
    """Return arrays of blank images, as the plan's image processor makes them; none where it has none.

    Raises:
        ModelError: The model's configuration has a value that the processor cannot serve.
    """
    for planned in plugins.plan.of_kind("processor"):
        cls: type[ImageProcessor] = import_planned(planned, plugins.plan.timeout_s)
        ids = {key: 0 for key in cls.token_texts if folder.config.get(key) is None}  # no tokenizer is read for it
        return list(_made(cls.from_config({**folder.config, **ids}, preprocessor_config(folder.path))))
    return []
