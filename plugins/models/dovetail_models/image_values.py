"""What image processors share: values of their configuration, checked. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dovetail.contracts import ModelError
from dovetail.contracts.processor import MAX_IMAGE_PIXELS

BILINEAR, BICUBIC = 2, 3
"""Pillow's numbers of the filters."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALVES = (0.5, 0.5, 0.5)
MAX_SIDE = 256
"""Of a patch, in pixels; published models have 14 and 16."""
MAX_TILE = 4096
"""Side of a tile, in pixels; published models have 448."""
RATIOS = {1: 1, 0.5: 2, 0.25: 4}
"""Sides of merged blocks by `downsample_ratio`, or a like key."""


def check_fixed(
    mean: tuple[float, ...], std: tuple[float, ...], preprocessor: Mapping[str, Any], **others: Any
) -> None:
    """Refuse values that another image processor has: the tower normalizes, and Pillow resizes, in one way.

    Args:
        mean: Of the pixels of each channel, from 0 to 1.
        std: Their deviation.
        preprocessor: `preprocessor_config.json`.
        others: Values of this family in place of the usual ones; None where any will do.

    Raises:
        ModelError: A value is another one; the message names its key.
    """
    fixed: dict[str, Any] = {
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True),
        **{"resample": BICUBIC, "rescale_factor": 1 / 255, "image_mean": list(mean), "image_std": list(std)},
        **others,
    }
    for key, value in fixed.items():
        given = preprocessor.get(key)
        if given is not None and value is not None and not _is_close(given, value):
            raise ModelError(f"preprocessor_config.json: {key} {given!r} is not supported; possible: {value!r}")


def _is_close(given: Any, value: Any) -> bool:
    if isinstance(value, list):
        return isinstance(given, list | tuple) and len(given) == len(value) and all(map(_is_close, given, value))
    return isinstance(given, int | float) and math.isclose(given, value, rel_tol=1e-6)


def object_of(value: Any, where: str) -> Mapping[str, Any]:
    """Return an object of a configuration; an empty one where there is none.

    Raises:
        ModelError: It is something else.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"{where}: expected an object, got {value!r}")
    return value or {}


def whole(given: Mapping[str, Any], key: str, default: int, most: int = MAX_IMAGE_PIXELS) -> int:
    """Return a whole number of a configuration from 1 to `most`; `default` where there is none.

    Raises:
        ModelError: It is none of these.
    """
    value = given.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ModelError(f"{key} {value!r} of an image model: possible: whole numbers from 1 to {most}")
    return value


def token(config: Mapping[str, Any], key: str, text: str = "", default: int | None = None) -> int:
    """Return a token id of `config.json`, or of the token with that text in the tokenizer, or the default.

    Raises:
        ModelError: There is none of these, or something else in `config.json`.
    """
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        hint = f", or {text} in the tokenizer" if text else ""
        raise ModelError(f"config.json: {key} {value!r} of an image model: give a token id{hint}")
    return value


def tile_sizes(config: Mapping[str, Any], key: str = "downsample_ratio") -> tuple[int, int, int]:
    """Return the sides of a tile and of a patch in pixels, and of a merged block in patches.

    Args:
        config: `config.json`.
        key: Of the ratio of sides of image and merged image, in the whole file or in `vision_config`.

    Raises:
        ModelError: Tiles or patches are no squares, or do not divide one another.
    """
    vision = object_of(config.get("vision_config"), "config.json: vision_config")
    side, patch = (_square(vision, name, default) for name, default in (("image_size", 448), ("patch_size", 14)))
    ratio = vision.get(key, config.get(key, 0.5))
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or ratio not in RATIOS:
        raise ModelError(f"config.json: {key} {ratio!r}: possible: {', '.join(map(str, RATIOS))}")
    merge = RATIOS[ratio]
    if side % (patch * merge):
        raise ModelError(
            f"config.json: vision_config: image_size {side} must be a multiple of {patch * merge}, a merged block"
        )
    return side, patch, merge


def _square(vision: Mapping[str, Any], key: str, default: int) -> int:
    given = vision.get(key)
    if isinstance(given, list | tuple) and len(given) == 2 and given[0] == given[1]:
        given = given[0]
    return whole({key: given}, key, default, MAX_TILE)
