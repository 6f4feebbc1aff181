"""Images for Qwen2-VL, 2.5-VL and 3-VL: resized to multiples of 28 or 32 pixels, cut into patches, merged by 2 x 2.

Equal to transformers' `Qwen2VLImageProcessorPil` (5.23): its resizing rule is repeated here in the same floating-point
operations, and Pillow resizes. Arrays are the resized pixels: equal to the bit; what the tower makes of them differs
from transformers' `pixel_values` by the rounding of float32. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from dovetail.contracts import ImageLayout, ImageProcessor, ModelError, RequestError
from dovetail.contracts.processor import MAX_IMAGE_PIXELS, Arrays
from dovetail.sdk.pixels import resized_patches
from dovetail_models.image_values import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    HALVES,
    MAX_SIDE,
    check_fixed,
    object_of,
    whole,
)

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_RATIO = 200
"""Of the longer side to the shorter."""


class Qwen2VLImages(ImageProcessor):
    """Images of any size, at their own resolution."""

    mean: ClassVar[tuple[float, ...]] = CLIP_MEAN
    std: ClassVar[tuple[float, ...]] = CLIP_STD
    default_pixels: ClassVar[tuple[int, int]] = (56 * 56, 28 * 28 * 1280)
    """Of the smallest and the largest resized image, where the configuration says nothing."""

    def __init__(self, token: int, patch: int, merge: int, min_pixels: int, max_pixels: int) -> None:
        """Take checked values: sides of a patch and of a merged block, and bounds of the resized image's pixels."""
        self.placeholder_id = self.embed_id = token
        self.patch, self.merge = patch, merge
        self.min_pixels, self.max_pixels = min_pixels, max_pixels

    @classmethod
    def from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Self:
        """See `ImageProcessor`."""
        vision = object_of(config.get("vision_config"), "config.json: vision_config")
        size = object_of(preprocessor.get("size"), "preprocessor_config.json: size")
        patch = whole(preprocessor, "patch_size", 14, MAX_SIDE)
        merge = whole(preprocessor, "merge_size", 2, 16)
        for key, value, default in (("patch_size", patch, 14), ("spatial_merge_size", merge, 2)):
            if (has := whole(vision, key, default, MAX_SIDE)) != value:
                raise ModelError(f"preprocessor_config.json has {key} {value}, the vision tower in config.json {has}")
        check_fixed(cls.mean, cls.std, preprocessor)
        least, most = cls.default_pixels
        lowest = whole(preprocessor, "min_pixels", whole(size, "shortest_edge", least, MAX_IMAGE_PIXELS))
        highest = whole(preprocessor, "max_pixels", whole(size, "longest_edge", most, MAX_IMAGE_PIXELS))
        if not lowest <= highest or highest < (patch * merge) ** 2:
            raise ModelError(
                f"preprocessor_config.json: min_pixels {lowest} and max_pixels {highest}: give at least "
                f"{(patch * merge) ** 2} as max_pixels, and no more as min_pixels"
            )
        return cls(whole(config, "image_token_id", 151655, 1 << 31), patch, merge, lowest, highest)

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `ImageProcessor`."""
        wide, high = self.resized(width, height)
        rows, columns = high // self.patch // self.merge, wide // self.patch // self.merge
        num = rows * columns
        return ImageLayout((self.embed_id,) * num, (1, rows, columns), num * self.merge**2)

    def process(self, image: Image) -> Arrays:
        """Return `patches` `[N, 3 * patch * patch]` uint8 and `grid` `[3]` int32: frames, rows and columns of patches.

        The patches of a merged block stand behind one another, in the order of the tower's merger. A patch has its
        red values row by row, then the green and the blue ones. transformers repeats it for a second frame.
        """
        wide, high = self.resized(*image.size)
        patches = resized_patches(image, (wide, high), BICUBIC, self.patch, self.merge)
        return {"patches": patches, "grid": np.array([1, high // self.patch, wide // self.patch], np.int32)}

    def max_patches(self) -> int:
        """See `ImageProcessor`: at the bound of the pixels, or where sides are rounded up from the lower one."""
        return self.merge**2 * self.max_blocks(self.min_pixels, self.max_pixels)

    def max_blocks(self, min_pixels: int, max_pixels: int) -> int:
        """Return the most merged blocks between such bounds, of a shape up to 200 : 1."""
        unit = (self.patch * self.merge) ** 2
        least = min_pixels / unit
        raised = math.ceil(least + (math.sqrt(MAX_RATIO) + 1) * math.sqrt(least)) + 1
        line = math.isqrt(MAX_RATIO * max_pixels // unit)  # of a lower bound on its shorter side
        return max(max_pixels // unit, line, raised)

    def fingerprint(self) -> str:
        """See `ImageProcessor`."""
        return f"qwen2-vl 1: {self.patch} {self.merge} {self.min_pixels} {self.max_pixels}"

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the resized image: multiples of a merged block, of about the same shape.

        Raises:
            RequestError: One side is more than 200 times the other.
        """
        if max(width, height) > MAX_RATIO * min(width, height):
            raise RequestError(
                f"an image of {width} x {height} pixels: one side may be at most {MAX_RATIO} times the other; crop it",
                code="invalid_image",
            )
        unit = self.patch * self.merge
        high, wide = round(height / unit) * unit, round(width / unit) * unit
        if high * wide > self.max_pixels:
            factor = math.sqrt((height * width) / self.max_pixels)
            high = max(unit, math.floor(height / factor / unit) * unit)
            wide = max(unit, math.floor(width / factor / unit) * unit)
        elif high * wide < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            high = math.ceil(height * factor / unit) * unit
            wide = math.ceil(width * factor / unit) * unit
        return wide, high


class Qwen3VLImages(Qwen2VLImages):
    """Images for Qwen3-VL: patches of 16, other values in the tower's normalization."""

    mean = HALVES
    std = HALVES
