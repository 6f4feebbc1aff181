"""Images for InternVL: cut into square tiles of about the image's shape, with the whole image as one more behind them.

Equal to transformers' `GotOcr2ImageProcessorPil` (5.23) as its `InternVLProcessor` uses it: that one always makes
tiles, whatever `crop_to_patches` says. The rule for tiles is repeated here in the same floating-point operations, and
Pillow resizes. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from dovetail.contracts import ImageLayout, ImageProcessor, ModelError
from dovetail.contracts.processor import Arrays
from dovetail.sdk.pixels import cut, resized
from dovetail_models.image_values import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    check_fixed,
    object_of,
    tile_sizes,
    token,
    whole,
)

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_TILES = 128
"""Without the whole image; published models have 12."""
MAX_TOKENS = 1 << 17
"""Of the largest image of a model."""
TEXTS = {"start_image_token_id": "<img>", "end_image_token_id": "</img>"}


class InternVLImages(ImageProcessor):
    """Images of any size, in 1 to 12 tiles."""

    token_texts: ClassVar[Mapping[str, str]] = TEXTS

    def __init__(self, tokens: tuple[int, int, int], side: int, patch: int, merge: int, tiles: tuple[int, int]) -> None:
        """Take checked values: ids of image, start and end, sides of tile, patch and merged block, bounds of tiles."""
        token, self.start, self.end = tokens
        self.placeholder_id = self.embed_id = token
        self.side, self.patch, self.merge, self.tiles = side, patch, merge, tiles
        lowest, highest = tiles
        sides = range(1, highest + 1)
        grids = [(wide, high) for wide in sides for high in sides if lowest <= wide * high <= highest]
        self._grids = sorted(grids, key=lambda grid: grid[0] * grid[1])

    @classmethod
    def from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Self:
        """See `ImageProcessor`."""
        side, patch, merge = tile_sizes(config)
        # What is missing, transformers takes from the processor of another model.
        given = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"height": 384, "width": 384}, **preprocessor}
        check_fixed(IMAGENET_MEAN, IMAGENET_STD, given)
        size = object_of(given["size"], "preprocessor_config.json: size")
        if {**size} != {"height": side, "width": side}:
            raise ModelError(
                f"preprocessor_config.json: size {dict(size)}: possible: {side} as height and as width, which is "
                "image_size of the vision tower in config.json"
            )
        lowest, highest = whole(given, "min_patches", 1, MAX_TILES), whole(given, "max_patches", 12, MAX_TILES)
        num = (side // patch // merge) ** 2 * (highest + 1) + 2
        if lowest > highest or num > MAX_TOKENS:
            raise ModelError(
                f"preprocessor_config.json: min_patches {lowest} and max_patches {highest}, with up to {num} tokens an "
                f"image: give no more as min_patches than as max_patches, and tiles of at most {MAX_TOKENS} tokens"
            )
        image = token(config, "image_token_id", "<IMG_CONTEXT>")
        start, end = (token(config, key, text) for key, text in TEXTS.items())
        return cls((image, start, end), side, patch, merge, (lowest, highest))

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `ImageProcessor`; the embeddings of a tile stand behind those of another, as frames."""
        columns, rows = self.grid(width, height)
        tiles = columns * rows + (columns * rows > 1)
        patches = self.side // self.patch
        side = patches // self.merge
        ids = (self.start, *(self.embed_id,) * (tiles * side**2), self.end)
        return ImageLayout(ids, (tiles, side, side), tiles * patches**2)

    def process(self, image: Image) -> Arrays:
        """Return `patches` `[N, 3 * patch * patch]` uint8, and `grid` `[3]` int32: tiles, and patches of their sides.

        Tiles stand row by row, and so do the patches of each. A patch has its red values row by row, then the green and
        the blue ones.
        """
        side = self.side
        columns, rows = self.grid(*image.size)
        pixels = resized(image, (columns * side, rows * side), BICUBIC)
        tiles = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, resized(image, (side, side), BICUBIC)[None]))
        num = side // self.patch
        return {"patches": cut(tiles, self.patch), "grid": np.array([len(tiles), num, num], np.int32)}

    def max_patches(self) -> int:
        """See `ImageProcessor`."""
        most = self.tiles[1]
        return (most + (most > 1)) * (self.side // self.patch) ** 2

    def fingerprint(self) -> str:
        """See `ImageProcessor`."""
        return f"internvl 1: {self.side} {self.patch} {self.tiles}"

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return columns and rows of tiles: of all grids the one nearest to the image's shape.

        Of equally near ones, the larger one is taken as long as it has less than twice the image's pixels.
        """
        shape, area = width / height, width * height
        nearest, best = float("inf"), (1, 1)
        for grid in self._grids:
            far = abs(shape - grid[0] / grid[1])
            if far < nearest:
                nearest, best = far, grid
            elif far == nearest and area > 0.5 * self.side * self.side * grid[0] * grid[1]:
                best = grid
        return best
