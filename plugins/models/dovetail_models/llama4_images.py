"""Images for Llama 4: cut into square tiles, with the whole image as one more behind them.

Pillow resizes; transformers' `Llama4ImageProcessor` (5.23) has torchvision do it, whose values differ by at most 1 of
255. Its rule for tiles is repeated here in the same floating-point operations, and the tokens are those that its
`Llama4Processor` writes. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from dovetail.contracts import ImageLayout, ImageProcessor, ModelError
from dovetail.contracts.processor import Arrays
from dovetail.sdk.pixels import cut, resized
from dovetail_models.image_values import (
    BILINEAR,
    HALVES,
    check_fixed,
    object_of,
    tile_sizes,
    token,
    whole,
)

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_TILES = 128
"""Without the whole image; published models have 16."""
MAX_TOKENS = 1 << 17
"""Of the largest image of a model."""
TEXTS = {
    **{"image_token_index": "<|patch|>", "boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>"},
    **{"column_end_token_id": "<|tile_x_separator|>", "row_end_token_id": "<|tile_y_separator|>"},
    "whole_image_token_id": "<|image|>",
}
"""The last three stand in the tokenizer only."""


class TokenIds(NamedTuple):
    """What stands in a prompt for an image, in the order of `TEXTS`."""

    patch: int
    start: int
    end: int
    column_end: int
    row_end: int
    whole: int


class Llama4Images(ImageProcessor):
    """Images of any size, in 1 to 16 tiles."""

    token_texts: ClassVar[Mapping[str, str]] = TEXTS

    def __init__(self, ids: TokenIds, side: int, patch: int, merge: int, most: int, *, enlarges: bool) -> None:
        """Take checked values: ids, sides of tile, patch and merged block, most tiles, whether images get all these."""
        self.ids, self.placeholder_id, self.embed_id = ids, ids.whole, ids.patch
        self.side, self.patch, self.merge, self.most, self.enlarges = side, patch, merge, most, enlarges
        grids = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
        self._grids = sorted(grids, key=lambda grid: grid[0] * grid[1])
        self._high, self._wide = np.array(self._grids, np.float32).T * np.float32(side)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Self:
        """See `ImageProcessor`."""
        side, patch, merge = tile_sizes(config, "pixel_shuffle_ratio")
        given = {"size": {"height": 336, "width": 336}, **preprocessor}
        check_fixed(HALVES, HALVES, given, resample=BILINEAR)
        size = object_of(given["size"], "preprocessor_config.json: size")
        if {**size} != {"height": side, "width": side}:
            raise ModelError(
                f"preprocessor_config.json: size {dict(size)}: possible: {side} as height and as width, which is "
                "image_size of the vision tower in config.json"
            )
        most = whole(given, "max_patches", 16, MAX_TILES)
        if (num := ((side // patch // merge) ** 2 + 1) * (most + 1) + 2) > MAX_TOKENS:
            raise ModelError(
                f"preprocessor_config.json: max_patches {most}, with up to {num} tokens an image: give tiles of "
                f"at most {MAX_TOKENS} tokens together"
            )
        enlarges = given.get("resize_to_max_canvas")
        if not isinstance(enlarges, bool | None):
            raise ModelError(f"preprocessor_config.json: resize_to_max_canvas {enlarges!r}: possible: true, false")
        # transformers takes both spellings of the first three.
        other = {key: key.replace("_index", "_id") for key in TEXTS}
        ids = TokenIds(*(token(config, o if (o := other[key]) in config else key, text) for key, text in TEXTS.items()))
        return cls(ids, side, patch, merge, most, enlarges=bool(enlarges))

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `ImageProcessor`; the embeddings of a tile stand behind those of another, as frames."""
        rows, columns = self.grid(width, height)
        across = self.side // self.patch
        side, ids = across // self.merge, self.ids
        tile = (ids.patch,) * side**2
        row = (*(*tile, ids.column_end) * (columns - 1), *tile, ids.row_end)
        several = rows * columns > 1
        tiles = rows * columns + several
        made = (ids.start, *(row * rows if several else ()), ids.whole, *tile, ids.end)
        return ImageLayout(made, (tiles, side, side), tiles * across**2)

    def process(self, image: Image) -> Arrays:
        """Return `patches` `[N, 3 * patch * patch]` uint8, and `grid` `[3]` int32: tiles, and patches of their sides.

        Tiles stand row by row, and so do the patches of each. A patch has its red values row by row, then the green and
        the blue ones. What the image leaves free, below and on the right, is black.
        """
        side = self.side
        rows, columns = self.grid(*image.size)
        wide, high = self.resized(*image.size)
        pixels = np.zeros((rows * side, columns * side, 3), np.uint8)
        pixels[:high, :wide] = resized(image, (wide, high), BILINEAR)
        tiles = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, resized(image, (side, side), BILINEAR)[None]))
        num = side // self.patch
        return {"patches": cut(tiles, self.patch), "grid": np.array([len(tiles), num, num], np.int32)}

    def max_patches(self) -> int:
        """See `ImageProcessor`."""
        return (self.most + (self.most > 1)) * (self.side // self.patch) ** 2

    def fingerprint(self) -> str:
        """See `ImageProcessor`."""
        return f"llama4 1: {self.side} {self.patch} {self.most} {self.enlarges}"

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles: the fewest of those in which the image has the wanted size.

        That is the smallest size at which it is not made smaller, if there is one, and else the largest. With
        `enlarges`, it is the largest in any case.
        """
        scales = np.minimum(self._wide / np.float32(width), self._high / np.float32(height))
        fitting = scales[scales >= 1]
        wanted = fitting.min() if len(fitting) and not self.enlarges else scales.max()
        return self._grids[int(np.argmax(scales == wanted))]

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the image in its tiles: those of the tiles on one side, if not too large.

        Without `enlarges`, a side that is longer than a tile does not grow. Sides of tiles are of float32 here, as they
        are for transformers: they round otherwise.
        """
        rows, columns = self.grid(width, height)
        most_wide, most_high = self._most(width, columns), self._most(height, rows)
        scale_wide, scale_high = most_wide / width, most_high / height
        if scale_wide < scale_high:
            wide, high = int(most_wide), min(math.floor(height * scale_wide), int(most_high))
        else:
            wide, high = min(math.floor(width * scale_high), int(most_wide)), int(most_high)
        return max(wide, 1), max(high, 1)

    def _most(self, length: int, tiles: int) -> int | np.float32:
        """Return how long a side may become; a number of float32 where it is a side of the tiles: see `resized`."""
        grown, most = max(length, self.side), tiles * self.side
        return np.float32(most) if self.enlarges or most < grown else grown
