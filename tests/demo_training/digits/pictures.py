"""Draw numbers: any font, size, place, colours and background, turned by a few degrees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

MOST: Final = 3
"""Digits of a number."""
NOTHING: Final = 10
"""The label of a place without a digit."""
MIN_HEIGHT: Final = 0.3
MAX_HEIGHT: Final = 0.8
"""Of digits, as shares of the square root of the image's pixels."""
MIN_CONTRAST: Final = 80
"""Between text and background, in levels of luminance."""
LUMINANCE: Final = np.array((0.299, 0.587, 0.114))


def number(rng: np.random.Generator, most: int = MOST, *, rising: bool = False) -> str:
    """Draw a number of one to `most` digits; `rising` makes long ones more likely."""
    weights = np.arange(1, most + 1) if rising else np.ones(most)
    length = int(rng.choice(most, p=weights / weights.sum())) + 1
    return "".join(map(str, rng.integers(0, 10, length)))


def shape(rng: np.random.Generator, smallest: float, largest: float) -> tuple[int, int]:
    """Draw a width and a height; the square root of the pixels is between `smallest` and `largest`."""
    side, ratio = rng.uniform(smallest, largest), 2 ** rng.uniform(-1.2, 1.2)
    return round(side * ratio**0.5), round(side / ratio**0.5)


def _background(rng: np.random.Generator, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a background `[height, width, 3]`, and two colours between which all of it is."""
    wide, high = size
    first = rng.integers(0, 256, 3).astype(np.float32)
    if rng.random() < 0.4:
        first[:] = first.mean()
    second = np.clip(first + rng.normal(0, 30, 3), 0, 255) if rng.random() < 0.4 else first
    across, down = np.linspace(-1, 1, wide), np.linspace(-1, 1, high)
    angle = rng.uniform(0, 2 * np.pi)
    ramp = (np.cos(angle) * across[None] + np.sin(angle) * down[:, None]) / 3 + 0.5
    return first + (second - first) * ramp[..., None].astype(np.float32), first, second


def _colour(rng: np.random.Generator, grounds: Sequence[np.ndarray]) -> np.ndarray:
    """Draw a colour that differs enough from both."""
    light = [float(ground @ LUMINANCE) for ground in grounds]
    for _ in range(20):
        found = rng.integers(0, 256, 3).astype(np.float32)
        if min(abs(float(found @ LUMINANCE) - each) for each in light) >= MIN_CONTRAST:
            return found
    return np.full(3, 255.0 if max(light) < 128 else 0.0, np.float32)


def _mask(rng: np.random.Generator, text: str, font: Path, size: tuple[int, int]) -> Image.Image:
    """Return a text's coverage, turned, at its place in the image."""
    wide, high = size
    left, top, right, bottom = ImageFont.truetype(font, 100).getbbox(text)
    fits = min(0.94 * high / (bottom - top), 0.92 * wide / (right - left))
    share = rng.uniform(MIN_HEIGHT, MAX_HEIGHT) * (wide * high) ** 0.5 / (bottom - top)
    drawn = ImageFont.truetype(font, max(6, int(100 * min(fits, share))))
    left, top, right, bottom = drawn.getbbox(text)
    margin = 2 + (right - left) // 12
    mask = Image.new("L", (int(right - left + 2 * margin), int(bottom - top + 2 * margin)))
    ImageDraw.Draw(mask).text((margin - left, margin - top), text, font=drawn, fill=255)
    if rng.random() < 0.6:
        mask = mask.rotate(rng.normal(0, 4), Image.Resampling.BICUBIC)
    mask = mask.crop(mask.getbbox())
    free = max(0, wide - mask.width), max(0, high - mask.height)
    cover = Image.new("L", size)
    cover.paste(mask, (int(rng.integers(0, free[0] + 1)), int(rng.integers(0, free[1] + 1))))
    return cover


def draw(rng: np.random.Generator, text: str, fonts: Sequence[Sequence[Path]], size: tuple[int, int]) -> Image.Image:
    """Draw a number, or nothing if it is empty.

    Args:
        rng: The source of everything that is not given.
        text: The digits.
        fonts: Files of each family; every family is as likely.
        size: Width and height in pixels.
    """
    ground, *ends = _background(rng, size)
    if text:
        family = fonts[int(rng.integers(len(fonts)))]
        cover = _mask(rng, text, family[int(rng.integers(len(family)))], size)
        ink = np.asarray(cover, np.float32)[..., None] / 255
        ground = ground + (_colour(rng, ends) - ground) * ink
    if rng.random() < 0.3:
        ground = ground + rng.normal(0, rng.uniform(2, 12), ground.shape)
    image = Image.fromarray(np.clip(ground, 0, 255).astype(np.uint8))
    if rng.random() < 0.2:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 0.006) * (size[0] * size[1]) ** 0.5))
    return image
