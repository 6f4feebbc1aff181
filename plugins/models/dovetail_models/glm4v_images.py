"""Images for GLM-4.1V and 4.5V: as Qwen2-VL's, with bounds of the pixels of two frames, and tiny images enlarged first.

Equal to transformers' `Glm4vImageProcessorPil` (5.23): its resizing rule is repeated here in the same floating-point
operations, and Pillow resizes. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from dovetail.contracts import ModelError, RequestError
from dovetail_models.image_values import token, whole
from dovetail_models.qwen2_vl_images import MAX_RATIO, Qwen2VLImages

FRAMES = 2
"""An image is as a video of so many equal frames."""


class Glm4vImages(Qwen2VLImages):
    """Images of any size, at their own resolution."""

    default_pixels = 112 * 112, 28 * 28 * 15000

    @classmethod
    def from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Self:
        """See `ImageProcessor`."""
        if (frames := whole(preprocessor, "temporal_patch_size", FRAMES, 16)) != FRAMES:
            raise ModelError(f"preprocessor_config.json: temporal_patch_size {frames}: possible: {FRAMES}")
        token(config, "image_token_id", "<|image|>")  # no default: the two models have different ones
        return super().from_config(config, preprocessor)

    def max_blocks(self, min_pixels: int, max_pixels: int) -> int:
        """See `Qwen2VLImages`."""
        return super().max_blocks(-(-min_pixels // FRAMES), max_pixels // FRAMES)

    def fingerprint(self) -> str:
        """See `ImageProcessor`."""
        return f"glm4v 1: {self.patch} {self.merge} {self.min_pixels} {self.max_pixels}"

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """See `Qwen2VLImages`."""
        unit = self.patch * self.merge
        wide, high = width, height
        if min(wide, high) < unit:
            scale = max(unit / high, unit / wide)
            wide, high = int(wide * scale), int(high * scale)
        if max(wide, high) / min(wide, high) > MAX_RATIO:
            raise RequestError(
                f"an image of {width} x {height} pixels: one side may be at most {MAX_RATIO} times the other; crop it",
                code="invalid_image",
            )
        rows, columns = round(high / unit), round(wide / unit)
        if FRAMES * rows * columns * unit**2 > self.max_pixels:
            factor = math.sqrt(FRAMES * high * wide / self.max_pixels)
            rows, columns = (max(1, math.floor(side / factor / unit)) for side in (high, wide))
        elif FRAMES * rows * columns * unit**2 < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (FRAMES * high * wide))
            rows, columns = (math.ceil(side * factor / unit) for side in (high, wide))
        return columns * unit, rows * unit
