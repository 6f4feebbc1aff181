"""Images for Gemma 3: each is stretched to one square, and has as many tokens as any other.

Equal to transformers' `Gemma3ImageProcessorPil` (5.23), and to the tokens that its `Gemma3Processor` writes. Pan and
scan, which adds crops of long images, is off in published models and not built. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from dovetail.contracts import ImageLayout, ImageProcessor, ModelError
from dovetail.contracts.processor import Arrays
from dovetail.sdk.pixels import resized_patches
from dovetail_models.image_values import BILINEAR, HALVES, check_fixed, object_of, token, whole

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SIDE = 4096
"""Of the square, in pixels, and of a patch; the published models have 896 and 14."""
MAX_TOKENS = 1 << 14


class Gemma3Images(ImageProcessor):
    """Images of any size."""

    around: ClassVar[tuple[str, str]] = ("\n\n", "\n\n")

    def __init__(self, tokens: tuple[int, int, int], num: int, side: int, patch: int) -> None:
        """Take checked values: ids that begin an image, stand for it and end it, how many, and sides in pixels."""
        self.placeholder_id, self.embed_id, end = tokens
        self.side, self.patch, root = side, patch, math.isqrt(num)
        ids = (self.placeholder_id, *(self.embed_id,) * num, end)
        self._layout = ImageLayout(ids, (1, root, root), (side // patch) ** 2)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Self:
        """See `ImageProcessor`."""
        vision = object_of(config.get("vision_config"), "config.json: vision_config")
        side, patch = whole(vision, "image_size", 224, MAX_SIDE), whole(vision, "patch_size", 16, MAX_SIDE)
        num = whole(config, "mm_tokens_per_image", 256, MAX_TOKENS)
        if (why := why_not_pooled(side, patch, num)) is not None:
            raise ModelError(why)
        check_fixed(HALVES, HALVES, preprocessor, resample=BILINEAR, do_pan_and_scan=False)
        size = object_of(preprocessor.get("size"), "preprocessor_config.json: size")
        if any(whole(size, key, side, MAX_SIDE) != side for key in ("height", "width")):
            raise ModelError(f"preprocessor_config.json: size {dict(size)}: the tower reads {side} x {side} pixels")
        if whole(preprocessor, "image_seq_length", num, MAX_TOKENS) != num:
            raise ModelError(
                f"preprocessor_config.json: image_seq_length {preprocessor['image_seq_length']}: config.json has "
                f"mm_tokens_per_image {num}"
            )
        begin = token(config, "boi_token_index", default=255999)
        image = token(config, "image_token_index", default=262144)
        return cls((begin, image, token(config, "eoi_token_index", default=256000)), num, side, patch)

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `ImageProcessor`."""
        return self._layout

    def process(self, image: Image) -> Arrays:
        """Return `patches` `[N, 3 * patch * patch]` uint8, row by row, and `grid` `[3]` int32: frames, rows, columns.

        A patch has its red values row by row, then the green and the blue ones.
        """
        patches = resized_patches(image, (self.side, self.side), BILINEAR, self.patch)
        num = self.side // self.patch
        return {"patches": patches, "grid": np.array([1, num, num], np.int32)}

    def max_patches(self) -> int:
        """See `ImageProcessor`."""
        return self._layout.num_patches

    def fingerprint(self) -> str:
        """See `ImageProcessor`."""
        return f"gemma3 1: {self.side} {self.patch}"


def why_not_pooled(side: int, patch: int, num: int) -> str | None:
    """Say why the patches of a square cannot be pooled to so many tokens, or None."""
    across, root = side // patch, math.isqrt(num)
    if side % patch or root * root != num or across % root:
        return (
            f"config.json: mm_tokens_per_image {num} of images of {side} pixels and patches of {patch}: give a square "
            "number whose root divides the patches of a row"
        )
    return None
