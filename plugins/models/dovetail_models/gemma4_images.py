"""Images for Gemma 4: as large as a number of tokens allows, at about their own shape, in patches that are pooled.

Equal to transformers' `Gemma4ImageProcessorPil` (5.23), and to the tokens that its `Gemma4Processor` writes: the
resizing rule is repeated here in the same floating-point operations, and Pillow resizes. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dovetail.contracts import ImageLayout, ImageProcessor, ModelError
from dovetail.contracts.processor import Arrays
from dovetail.sdk.pixels import resized
from dovetail_models.image_values import BICUBIC, check_fixed, object_of, token, whole

if TYPE_CHECKING:
    from PIL.Image import Image

SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Most tokens of an image that a model may be asked for."""
MAX_SIDE = 256
"""Of a patch, in pixels, and of a block of patches; published models have 16 and 3."""
SIDES = {"patch_size": 16, "pooling_kernel_size": 3}
"""What transformers takes where nothing is said."""
NONE, ALL = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
"""Mean and deviation of pixels that are not normalized."""


class Gemma4Images(ImageProcessor):
    """Images of any size."""

    def __init__(self, tokens: tuple[int, int, int], patch: int, pool: int, most: int) -> None:
        """Take checked values: ids that begin an image, stand for it and end it, sides of patch and block, tokens."""
        self.begin, self.embed_id, self.end = tokens
        self.placeholder_id = self.embed_id
        self.patch, self.pool, self.most = patch, pool, most

    @classmethod
    def from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Self:
        """See `ImageProcessor`."""
        vision = object_of(config.get("vision_config"), "config.json: vision_config")
        text = object_of(config.get("text_config"), "config.json: text_config")
        patch, pool = (whole(vision, key, default, MAX_SIDE) for key, default in SIDES.items())
        for key, value in zip(SIDES, (patch, pool), strict=True):
            if (given := whole(preprocessor, key, SIDES[key], MAX_SIDE)) != value:
                raise ModelError(f"preprocessor_config.json has {key} {given}, the tower in config.json {value}")
        check_fixed(NONE, ALL, preprocessor, do_normalize=None)
        most = whole(preprocessor, "max_soft_tokens", 280, SOFT_TOKENS[-1])
        if most not in SOFT_TOKENS:
            raise ModelError(f"preprocessor_config.json: max_soft_tokens {most}: possible: {SOFT_TOKENS}")
        window = whole(text, "sliding_window", 512, 1 << 31)
        if text.get("use_bidirectional_attention") == "vision" and window < most:
            raise ModelError(
                f"preprocessor_config.json: max_soft_tokens {most}: images see both ways within a sliding_window of "
                f"{window}; give at most as many tokens"
            )
        begin, image = token(config, "boi_token_id", default=255999), token(config, "image_token_id", default=258880)
        return cls((begin, image, token(config, "eoi_token_id", default=258882)), patch, pool, most)

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `ImageProcessor`."""
        wide, high = self.resized(width, height)
        unit = self.patch * self.pool
        rows, columns = high // unit, wide // unit
        num = rows * columns
        ids = (self.begin, *(self.embed_id,) * num, self.end)
        return ImageLayout(ids, (1, rows, columns), num * self.pool**2)

    def process(self, image: Image) -> Arrays:
        """Return `patches` `[N, 3 * patch * patch]` uint8, row by row, and `grid` `[3]` int32: frames, rows, columns.

        A patch has its pixels row by row, each with its three values.
        """
        size, patch = self.resized(*image.size), self.patch
        pixels = resized(image, size, BICUBIC)
        rows, columns = size[1] // patch, size[0] // patch
        blocks = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4)
        patches = np.ascontiguousarray(blocks).reshape(rows * columns, -1)
        return {"patches": patches, "grid": np.array([1, rows, columns], np.int32)}

    def max_patches(self) -> int:
        """See `ImageProcessor`."""
        return self.most * self.pool**2

    def fingerprint(self) -> str:
        """See `ImageProcessor`."""
        return f"gemma4 1: {self.patch} {self.pool} {self.most}"

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the resized image: multiples of a block, of one at least."""
        unit, most = self.patch * self.pool, self.most * self.pool**2 * self.patch**2
        factor = math.sqrt(most / (height * width))
        high = math.floor(factor * height / unit) * unit
        wide = math.floor(factor * width / unit) * unit
        longest = self.most * unit
        if high == 0:
            return min(width // height * unit, longest), unit
        if wide == 0:
            return unit, min(height // width * unit, longest)
        return wide, high
