"""Images that several threads resize have the bits that Pillow gives the whole."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dovetail.sdk import pixels
from dovetail.sdk.pixels import PixelThreads, cut, resized, resized_patches

sys.path.append(str(Path(__file__).parents[1] / "models"))  # the models that see

from seeing import make_vl, processor_of

FILTERS = [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[PixelThreads]:
    """Several, which work on small images, too."""
    made = PixelThreads()
    made.number = 3
    monkeypatch.setattr(pixels, "THREADS", made)
    monkeypatch.setattr(pixels, "MIN_PIXELS", 1)
    yield made
    if made._executor is not None:
        made._executor.shutdown()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def test_any_size_becomes_any_size(threads: PixelThreads) -> None:
    """Whether rows or columns are resized first depends on the sizes."""
    rng, whole = random.Random(5), noise(90, 90)
    for _ in range(300):
        width, height, *size = (rng.randint(1, 90) for _ in range(4))
        image, how = whole.crop((0, 0, width, height)), rng.choice(FILTERS)
        found = resized(image, (size[0], size[1]), how)
        assert np.array_equal(found, np.asarray(image.resize((size[0], size[1]), how))), (width, height, size, how)
    assert threads._executor is not None


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_patches_have_the_values_of_their_places(merge: int, threads: PixelThreads) -> None:
    """Rows of a patch are copied as items of many widths: each value stands where plain axes put it."""
    for patch, rows, columns in ((1, 2, 3), (2, 1, 4), (3, 2, 1), (7, 2, 2), (14, 3, 2), (16, 1, 2), (17, 2, 1)):
        high, wide = rows * merge * patch, columns * merge * patch
        image = noise(50, 40, patch)
        pixels = np.asarray(image.resize((wide, high), FILTERS[1]))
        plain = pixels.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        wanted = plain.reshape(-1, 3 * patch * patch)
        assert np.array_equal(cut(pixels, patch, merge), wanted)
        assert np.array_equal(cut(np.stack((pixels, pixels)), patch, merge), np.concatenate((wanted, wanted)))
        for threads.number in (1, 3):
            assert np.array_equal(resized_patches(image, (wide, high), FILTERS[1], patch, merge), wanted)


def test_without_room_for_a_thread_there_are_none(threads: PixelThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is resized all the same."""

    def start(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("concurrent.futures.thread.threading.Thread.start", start)
    image = noise(40, 30)
    assert np.array_equal(resized(image, (50, 60), 3), np.asarray(image.resize((50, 60), 3)))
    assert threads.number == 1


@pytest.mark.parametrize(
    "kind", ["qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3", "gemma4", "mistral3", "internvl", "llama4"]
)
def test_every_processor_makes_the_same_arrays(kind: str, threads: PixelThreads, tmp_path: Path) -> None:
    """They are contiguous, as the contract has it, however the pixels lie in memory."""
    make_vl(tmp_path, kind)
    processor = processor_of(tmp_path)
    for size in ((97, 61), (56, 56), (40, 120)):
        threads.number = 3
        found = processor.process(noise(*size))
        threads.number = 1
        plain = processor.process(noise(*size))
        assert found.keys() == plain.keys()
        for name, array in found.items():
            assert array.flags.c_contiguous
            assert np.array_equal(array, plain[name])
