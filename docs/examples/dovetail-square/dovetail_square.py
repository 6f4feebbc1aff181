"""Images for models whose tower reads one fixed square, with a marker before and behind the image's tokens.

The sides of square and patch stand in the model's `preprocessor_config.json`, the ids of the markers in `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dovetail.contracts import ImageLayout, ImageProcessor, ModelError, RequestError
from dovetail.contracts.processor import Arrays

if TYPE_CHECKING:
    from PIL.Image import Image

BILINEAR = 2


class Square(ImageProcessor):
    """Cuts the largest square out of an image's middle and resizes it."""

    def __init__(self, begin: int, token: int, end: int, side: int, patch: int) -> None:
        """Take checked values: ids of the two markers and of the image's tokens, and sides in pixels."""
        self.placeholder_id, self.embed_id = begin, token
        self.end, self.side, self.patch = end, side, patch

    @classmethod
    def from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Self:
        """Read both files' values."""
        begin, token, end = (_whole(config, f"{name}_token_id", 0) for name in ("begin_image", "image", "end_image"))
        side, patch = _whole(preprocessor, "image_size", 1), _whole(preprocessor, "patch_size", 1)
        if side % patch or side > 4096 or side // patch > 256:
            raise ModelError(f"image_size {side}: give a multiple of patch_size {patch}, at most 4096 and 256 patches")
        return cls(begin, token, end, side, patch)

    def layout(self, width: int, height: int) -> ImageLayout:
        """Return the square's tokens between the markers; lines are refused."""
        if min(width, height) * 100 < max(width, height):
            raise RequestError(f"an image of {width} x {height} pixels: one side may be at most 100 times the other")
        num = self.side // self.patch
        return ImageLayout((self.placeholder_id, *[self.embed_id] * num**2, self.end), (1, num, num), num**2)

    def process(self, image: Image) -> Arrays:
        """Return the patches `[N, patch * patch * 3]`, row by row."""
        self.layout(*image.size)
        width, height = image.size
        half = min(width, height) / 2
        box = (width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half)
        pixels = np.asarray(image.resize((self.side, self.side), BILINEAR, box))
        num = self.side // self.patch
        patches = pixels.reshape(num, self.patch, num, self.patch, 3).swapaxes(1, 2)
        return {"patches": np.ascontiguousarray(patches).reshape(num**2, -1)}

    def max_patches(self) -> int:
        """Return the patches of the square, which all images have."""
        return (self.side // self.patch) ** 2

    def fingerprint(self) -> str:
        """Say what the arrays depend on."""
        return f"square {self.side} {self.patch}"


def _whole(given: Mapping[str, Any], key: str, least: int) -> int:
    value = given.get(key)
    if type(value) is not int or not least <= value < 1 << 31:
        raise ModelError(f"{key} {value!r}: expected a whole number from {least} on")
    return value
