"""Images for Pixtral and Mistral 3: shrunk to a longest edge, in rows of tokens with a break behind each.

Equal to transformers' `PixtralImageProcessorPil` (5.23), and to the rows that its `PixtralProcessor` writes: its
resizing rule is repeated here in the same floating-point operations, and Pillow resizes. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from dovetail.contracts import ImageLayout, ImageProcessor, ModelError, RequestError
from dovetail.contracts.processor import Arrays
from dovetail.sdk.pixels import resized_patches
from dovetail_models.image_values import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    MAX_SIDE,
    check_fixed,
    object_of,
    token,
    whole,
)

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_TOKENS = 1 << 17
"""Of the largest image of a model; published ones have 4,160 and less."""
MAX_EDGE = 1 << 16
TEXTS = {"image_break_token_id": "[IMG_BREAK]", "image_end_token_id": "[IMG_END]"}


class PixtralImages(ImageProcessor):
    """Images of any size, no longer and no wider than a model's largest."""

    token_texts: ClassVar[Mapping[str, str]] = TEXTS

    def __init__(self, tokens: tuple[int, int, int], patch: int, merge: int, largest: tuple[int, int]) -> None:
        """Take checked values: ids of image, break and end, sides of a patch and a merged block, height and width."""
        token, self.row_end, self.end = tokens
        self.placeholder_id = self.embed_id = token
        self.patch, self.merge, self.largest = patch, merge, largest

    @classmethod
    def from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Self:
        """See `ImageProcessor`."""
        vision = object_of(config.get("vision_config"), "config.json: vision_config")
        if (kind := vision.get("model_type", "pixtral")) != "pixtral":
            raise ModelError(
                f"config.json: vision_config: model_type {kind!r}: this image processor is for 'pixtral'; give "
                "--processor none to serve the text part alone"
            )
        patch = whole(vision, "patch_size", 14 if config.get("model_type") == "mistral3" else 16, MAX_SIDE)
        merge = whole(config, "spatial_merge_size", 2, 16) if config.get("model_type") == "mistral3" else 1
        check_fixed(CLIP_MEAN, CLIP_STD, preprocessor)
        _check_patch(preprocessor.get("patch_size"), patch, merge)
        size = object_of(preprocessor.get("size"), "preprocessor_config.json: size")
        edge = whole(size, "longest_edge", 1024, MAX_EDGE)
        sides = ("height", "width") if "longest_edge" not in size else ()
        high, wide = (whole(size, key, edge, MAX_EDGE) for key in sides) if sides else (edge, edge)
        unit = patch * merge
        rows, columns = -(-high // unit), -(-wide // unit)
        if rows * (columns + 1) > MAX_TOKENS:
            raise ModelError(
                f"preprocessor_config.json: an image of size {dict(size)} would have {rows * (columns + 1)} tokens; "
                f"at most {MAX_TOKENS} are possible"
            )
        image = token(config, "image_token_id" if "image_token_id" in config else "image_token_index", "[IMG]")
        row_end, end = (token(config, key, text) for key, text in TEXTS.items())
        return cls((image, row_end, end), patch, merge, (high, wide))

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `ImageProcessor`."""
        wide, high = self.resized(width, height)
        unit = self.patch * self.merge
        rows, columns = high // unit, wide // unit
        ids = ((self.embed_id,) * columns + (self.row_end,)) * rows
        return ImageLayout((*ids[:-1], self.end), (1, rows, columns), rows * columns * self.merge**2)

    def process(self, image: Image) -> Arrays:
        """Return `patches` `[N, 3 * patch * patch]` uint8, row by row, and `grid` `[3]` int32: frames, rows, columns.

        A patch has its red values row by row, then the green and the blue ones.
        """
        size = self.resized(*image.size)
        patches = resized_patches(image, size, BICUBIC, self.patch)
        return {"patches": patches, "grid": np.array([1, size[1] // self.patch, size[0] // self.patch], np.int32)}

    def max_patches(self) -> int:
        """See `ImageProcessor`."""
        rows, columns = (-(-side // (self.patch * self.merge)) for side in self.largest)
        return rows * columns * self.merge**2

    def fingerprint(self) -> str:
        """See `ImageProcessor`."""
        return f"pixtral 1: {self.patch} {self.merge} {self.largest}"

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the resized image: multiples of a merged block.

        Raises:
            RequestError: The image is so narrow that nothing of it is left.
        """
        wide, high = width, height
        if (ratio := max(height / self.largest[0], width / self.largest[1])) > 1:
            wide, high = math.floor(width / ratio), math.floor(height / ratio)
        if not min(wide, high):
            raise RequestError(
                f"an image of {width} x {height} pixels becomes {wide} x {high} for this model; crop it",
                code="invalid_image",
            )
        unit = self.patch * self.merge
        return -(-wide // unit) * unit, -(-high // unit) * unit


def _check_patch(given: Any, patch: int, merge: int) -> None:
    """Refuse a patch that is neither the tower's nor a merged block."""
    if given is None:
        return
    sides = (given.get("height"), given.get("width")) if isinstance(given, Mapping) else (given, given)
    if sides not in ((patch, patch), (patch * merge, patch * merge)):
        raise ModelError(f"preprocessor_config.json has patch_size {given!r}, the vision tower in config.json {patch}")
