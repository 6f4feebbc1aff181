"""Pictures to train on: numbers drawn once, then placed, sized, turned and coloured anew for every batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from demo_training.digits.pictures import MAX_HEIGHT, MIN_CONTRAST, MIN_HEIGHT, MOST, NOTHING, number

SIDE: Final = 84
"""The side in pixels of a square that is as large as what the tower gets; crops have numbers of the same sizes."""
LABELS: Final = (NOTHING + 1, 5, 5)
"""How many values each label of a patch has."""
CANVAS: Final = (64, 168)
"""Rows and columns of a drawn number."""
SHARP: Final = 0.7
"""The smallest scale for which the whole drawing is read."""
LIGHT: Final = torch.tensor((0.299, 0.587, 0.114))


@dataclass(frozen=True)
class Strokes:
    """Drawn numbers.

    Attributes:
        ink: Coverage, whole and at half its size, `[S, 2, 64, 168]` uint8.
        ends: Left ends of the digits, then the right end of the number, `[S, 5]`.
        boxes: Left, top, right and bottom of the ink, `[S, 4]`.
        digits: `[S, 4]`; `NOTHING` behind the last.
    """

    ink: Tensor
    ends: Tensor
    boxes: Tensor
    digits: Tensor


def draw_strokes(rng: np.random.Generator, fonts: Sequence[Sequence[Path]], num: int, most: int = MOST) -> Strokes:
    """Draw `num` numbers of up to `most` digits; every family is as likely, and longer numbers are more likely."""
    high, wide = CANVAS
    ink = np.zeros((num, 2, high, wide), np.uint8)
    ends, boxes = np.zeros((num, 5), np.float32), np.zeros((num, 4), np.float32)
    digits = np.full((num, 4), NOTHING)
    for at in range(num):
        text = number(rng, most, rising=True)
        family = fonts[int(rng.integers(len(fonts)))]
        path = family[int(rng.integers(len(family)))]
        left, top, right, bottom = ImageFont.truetype(path, 100).getbbox(text)
        points = int(100 * min((high - 6) / (bottom - top), (wide - 6) / (right - left)))
        font = ImageFont.truetype(path, points)
        left, top, right, bottom = font.getbbox(text)
        image = Image.new("L", (wide, high))
        x, y = 3 - left, 3 - top
        ImageDraw.Draw(image).text((x, y), text, font=font, fill=255)
        ink[at, 0] = np.asarray(image)
        ink[at, 1, : high // 2, : wide // 2] = np.asarray(image.reduce(2))
        ends[at] = x + font.getlength(text)
        ends[at, : len(text)] = [x + font.getlength(text[:count]) for count in range(len(text))]
        boxes[at] = image.getbbox()
        digits[at, : len(text)] = [*map(int, text)]
    return Strokes(*map(torch.from_numpy, (ink, ends, boxes, digits)))


class Painter:
    """Paints batches of pictures.

    Args:
        strokes: What it paints.
        seed: Of everything that it draws by lot.
    """

    def __init__(self, strokes: Strokes, seed: int) -> None:
        self._strokes = strokes
        self.num = len(strokes.digits)
        self._lot = torch.Generator().manual_seed(seed)

    def paint(self, chosen: Tensor, size: tuple[int, int], patch: int) -> tuple[Tensor, Tensor]:
        """Paint numbers.

        Args:
            chosen: Which strokes, `[B]`; -1 paints none.
            size: Rows and columns of pixels.
            patch: The side of a patch, for the labels.

        Returns:
            Pixels `[B, 3, rows, columns]` from 0 to 255, and labels `[B, 3, rows / patch, columns / patch]`: the digit,
            its index, and how many follow it; the last of `LABELS` where there is none.
        """
        high, wide = size
        strokes, at = self._strokes, chosen.clamp(min=0)
        place = self._place(strokes.boxes[at], size)
        level = (place[3] < SHARP).long()  # what is drawn much smaller comes from the half-sized drawing
        fine = self._sources(place, _middles(high, 1), _middles(wide, 1)) * (1 - level / 2)[:, None, None, None]
        scale = 2 / torch.tensor((CANVAS[1], CANVAS[0]))
        drawn = strokes.ink[at, level][:, None].float() / 255
        cover = F.grid_sample(drawn, fine * scale - 1, align_corners=False) * (chosen >= 0)[:, None, None, None]
        x, y = self._sources(place, _middles(high, patch), _middles(wide, patch)).unbind(-1)
        slot = (x[..., None] >= strokes.ends[at][:, None, None]).sum(-1) - 1
        box = strokes.boxes[at][:, :, None, None]
        last = (strokes.digits[at] != NOTHING).sum(1)[:, None, None] - 1
        outside = (slot < 0) | (slot > last) | (y < box[:, 1]) | (y > box[:, 3]) | (chosen < 0)[:, None, None]
        digits = strokes.digits[at].gather(1, slot.clamp(0, 3).flatten(1)).view_as(slot)
        found = zip((digits, slot, last - slot), LABELS, strict=True)
        return self._colour(cover), torch.stack([each.masked_fill(outside, num - 1) for each, num in found], 1)

    def text(self, index: int) -> str:
        """Return a number, or an empty text for -1."""
        return (
            ""
            if index < 0
            else "".join(str(digit) for digit in self._strokes.digits[index].tolist() if digit < NOTHING)
        )

    def _uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._lot) * (high - low) + low

    def _place(self, boxes: Tensor, size: tuple[int, int]) -> Tensor:
        """Draw the middle (x, y), scales, angle and slant of each number; `[6, B]`."""
        (high, wide), num = size, len(boxes)
        own = boxes[:, 2:] - boxes[:, :2]
        height = self._uniform(MIN_HEIGHT, MAX_HEIGHT, num) * SIDE
        fits = torch.minimum(0.96 * high / own[:, 1], 0.94 * wide / own[:, 0])
        scale = torch.minimum(height / own[:, 1], fits)
        turned = (self._uniform(0, 1, num) < 0.6).float()
        angle = torch.randn(num, generator=self._lot) * 0.07 * turned
        slant = torch.randn(num, generator=self._lot) * 0.06
        stretch = self._uniform(0.8, 1.0, num)
        free_x, free_y = (wide - own[:, 0] * scale).clamp(min=0), (high - own[:, 1] * scale).clamp(min=0)
        x = wide / 2 + free_x * self._uniform(-0.5, 0.5, num)
        y = high / 2 + free_y * self._uniform(-0.5, 0.5, num)
        middle = (boxes[:, 2:] + boxes[:, :2]) / 2
        return torch.stack((x, y, scale * stretch, scale, angle, slant, middle[:, 0], middle[:, 1]))

    def _sources(self, place: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return where in the canvas each place of a picture comes from, `[B, rows, columns, 2]`."""
        x0, y0, wider, higher, angle, slant, own_x, own_y = (each[:, None, None] for each in place)
        x, y = columns[None, None] - x0, rows[None, :, None] - y0
        turned_x, turned_y = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
        return torch.stack(((turned_x + slant * turned_y) / wider + own_x, turned_y / higher + own_y), -1)

    def _colour(self, cover: Tensor) -> Tensor:
        """Give text and ground colours that differ enough, and some grounds a slope, noise or blur."""
        num, _, high, wide = cover.shape
        first, free = self._uniform(0, 255, num, 3), self._uniform(0, 255, num, 8, 3)
        free[:, -1] = torch.where(first @ LIGHT < 128, 255.0, 0.0)[:, None]
        enough = ((free - first[:, None]) @ LIGHT).abs() >= MIN_CONTRAST + 20
        text = free[torch.arange(num), enough.float().argmax(1)]
        ramp = torch.linspace(-1, 1, wide)[None, None] * self._uniform(-1, 1, num, 1, 1)
        ramp = ramp + torch.linspace(-1, 1, high)[None, :, None] * self._uniform(-1, 1, num, 1, 1)
        slope = torch.randn((num, 3), generator=self._lot) * 8 * (self._uniform(0, 1, num, 1) < 0.4)
        ground = (first[:, :, None, None] + slope[:, :, None, None] * ramp[:, None]).clamp(0, 255)
        soft = (self._uniform(0, 1, num, 1, 1, 1) < 0.25).float() * 0.7
        cover = cover + soft * (F.avg_pool2d(cover, 3, 1, 1) - cover)
        made = ground + (text[:, :, None, None] - ground) * cover
        noise = self._uniform(1, 8, num, 1, 1, 1) * (self._uniform(0, 1, num, 1, 1, 1) < 0.3)
        return (made + noise * torch.randn(made.shape, generator=self._lot)).clamp(0, 255)


def _middles(length: int, step: float) -> Tensor:
    """Return the middles of steps of a length in pixels."""
    return (torch.arange(round(length / step)) + 0.5) * step
