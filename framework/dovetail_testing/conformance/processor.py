"""What every image processor must do: count before it sees pixels, return the same arrays, refuse what it cannot."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from dovetail.contracts.errors import ModelError, RequestError
from dovetail.contracts.processor import MAX_IMAGE_PIXELS, Arrays, ImageLayout, ImageProcessor
from dovetail_testing.checks import check, fail, no_error, raised, shown
from dovetail_testing.conformance.base import Conformance
from dovetail_testing.conformance.growth import operations

if TYPE_CHECKING:
    from PIL.Image import Image

SIZES = ((1, 1), (7, 5), (28, 28), (61, 43), (90, 200), (333, 127))
"""Of the images that are processed: odd ones, too."""
EXTREME = ((1, 1), (1, 201), (40_000, 1), (1, 1 << 26), (8192, 8192), (1 << 20, 1 << 20), (10**9, 10**9))
ODD_VALUES: tuple[Any, ...] = ("x", "3", -1, 0, 1, 0.5, 1e308, float("nan"), 10**30, True, [], [1], {}, {"a": 1})
SLACK = 50


class ImageProcessorConformance(Conformance):
    """What every image processor must do.

    Attributes:
        config: What of `config.json` it reads, of a model that it serves.
        preprocessor: The same of `preprocessor_config.json`.
        changes: Other values of `preprocessor` that alter the arrays of an image.
        max_tokens: Most tokens of an image, whatever the configuration that is accepted.
        tolerance: By how much uint8 values may differ from those of `reference_arrays`: 0 where the original processor
            uses Pillow, too.
        num_sizes: How many random sizes are tried.
        seed: Of sizes and pixels.
    """

    kind = "processor"
    config: ClassVar[Mapping[str, Any]] = MappingProxyType({"image_token_id": 5})
    preprocessor: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    changes: ClassVar[Sequence[Mapping[str, Any]]] = ()
    max_tokens: ClassVar[int] = 1 << 17
    tolerance: ClassVar[int] = 0
    num_sizes: ClassVar[int] = 10_000
    seed: ClassVar[int] = 7

    def reference_count(self, width: int, height: int) -> int | None:
        """Return how many embeddings the model's original processor makes of an image; None: nothing to compare."""
        return None

    def reference_arrays(self, image: Image) -> Arrays | None:
        """Return what the original processor makes of an image, in the plugin's own form; None: nothing to compare."""
        return None

    def processor(self, changed: Mapping[str, Any] | None = None) -> ImageProcessor:
        """Make the plugin as a server does."""
        try:
            made: ImageProcessor = self.plugin().from_config(self.config, {**self.preprocessor, **(changed or {})})
        except Exception as error:  # a stranger's class; the message says what it did
            fail(f"from_config raised {raised(error)} for {shown(changed or dict(self.preprocessor))}")
        return made

    def image(self, width: int, height: int) -> Image:
        """Make up an image: noise on a ramp, so that every pixel counts."""
        image_module = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'dovetail-llm[vision]'")
        rng = np.random.default_rng((self.seed, width, height))
        ramp = np.linspace(0, 160, width * height * 3).reshape(height, width, 3)
        made: Image = image_module.fromarray((ramp + rng.integers(0, 95, ramp.shape)).astype(np.uint8))
        return made

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Yield random sizes, from thumbnails to the largest images, of every shape up to 1 : 50."""
        rng = random.Random(self.seed)
        for _ in range(self.num_sizes):
            area, ratio = 2 ** rng.uniform(4, 25.9), 50 ** rng.uniform(-1, 1)
            yield max(1, int((area * ratio) ** 0.5)), max(1, int((area / ratio) ** 0.5))

    def layout(self, processor: ImageProcessor, width: int, height: int) -> ImageLayout | None:
        """Ask for a layout and look at it; None where the size is refused."""
        size = f"{width} x {height}"
        try:
            found = processor.layout(width, height)
        except RequestError:
            return None
        except Exception as error:  # a stranger's code; the message says what it did
            fail(f"layout raised {raised(error)} for {size}; a size that is not possible is a RequestError")
        num = found.num_embeds
        check(num > 0 and found.num_patches > 0, f"{size}: {num} embeddings of {found.num_patches} patches")
        most = processor.max_patches()
        check(most is None or found.num_patches <= most, f"{size}: {found.num_patches} patches, max_patches {most}")
        check(len(found.ids) <= self.max_tokens, f"{size}: {len(found.ids)} tokens; at most {self.max_tokens} here")
        stand = found.ids.count(processor.embed_id)
        check(stand == num, f"{size}: grid {found.grid} has {num} embeddings, and embed_id stands {stand} times in ids")
        wrong = next((token for token in set(found.ids) if type(token) is not int or token < 0), None)
        check(wrong is None, f"{size}: ids have {wrong!r}, which is no token id")
        return found

    def arrays(self, processor: ImageProcessor, image: Image) -> Arrays:
        """Process an image and look at the arrays."""
        with no_error("process", f" for an image of {image.size}, whose layout it gave"):
            found = processor.process(image)
        for name, array in found.items():
            what = f"array {name!r} of an image of {image.size}"
            check(array.dtype.name in ("uint8", "int32"), f"{what} has dtype {array.dtype}; possible: uint8, int32")
            check(array.flags.c_contiguous, f"{what} is not C-contiguous")
        return found

    def test_layouts_are_sound(self) -> None:
        """For 10,000 sizes, ids and grid agree, and the same size gives the same layout."""
        processor = self.processor()
        served = 0
        for width, height in self.sizes():
            found = self.layout(processor, width, height)
            served += found is not None
            check(
                found == self.layout(processor, width, height),
                f"{width} x {height} has another layout when asked again",
            )
        check(served > 0, "every size is refused")

    def test_counts_equal_the_reference(self) -> None:
        """For 10,000 sizes, there are as many embeddings as the model's original processor makes."""
        if self.reference_count(56, 56) is None:
            pytest.skip("no reference_count to compare with")
        processor = self.processor()
        for width, height in self.sizes():
            wanted, found = self.reference_count(width, height), self.layout(processor, width, height)
            num = None if found is None else found.num_embeds
            check(num == wanted, f"{width} x {height}: {num} embeddings, {wanted} by the reference")

    def test_arrays_are_a_pure_function_of_the_image(self) -> None:
        """The same image gives the same arrays, another one others; the image stays as it was."""
        processor, seen = self.processor(), {}
        for size in SIZES:
            if self.layout(processor, *size) is None:
                continue
            image = self.image(*size)
            before = image.tobytes()
            first, second = self.arrays(processor, image), self.arrays(processor, image)
            check(_same(first, second), f"an image of {size} gives other arrays the second time")
            check(image.tobytes() == before, f"process changed the image of {size} that it was given")
            seen[size] = first
            inverse = image.point(lambda value: 255 - value)
            check(
                not _same(first, self.arrays(processor, inverse)), f"{size}: the inverted image gives the same arrays"
            )

    def test_arrays_equal_the_reference(self) -> None:
        """Every array equals what the model's original processor makes, to the bit or within `tolerance`."""
        if self.reference_arrays(self.image(56, 56)) is None:
            pytest.skip("no reference_arrays to compare with")
        processor = self.processor()
        for size in SIZES:
            image = self.image(*size)
            wanted = self.reference_arrays(image) or {}
            found = self.arrays(processor, image)
            for name, array in wanted.items():
                is_same = name in found and self._is_near(found[name], array)
                check(is_same, f"array {name!r} of an image of {size} differs from the reference")

    def _is_near(self, found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> bool:
        if found.dtype.name != "uint8" or found.shape != wanted.shape or found.dtype != wanted.dtype:
            return np.array_equal(found, wanted)
        far = np.maximum(found, wanted) - np.minimum(found, wanted)
        return int(far.max(initial=0)) <= self.tolerance

    def test_a_layout_costs_the_same_for_large_images(self) -> None:
        """A layout is computed in the HTTP process: a large image costs as many operations as a small one."""
        processor = self.processor()
        small, large = (operations(lambda side=side: self._asked(processor, side)) for side in (64, 8192))  # type: ignore[misc]
        check(large <= 2 * small + SLACK, f"a layout costs {small} operations for 64 x 64, {large} for 8192 x 8192")

    @staticmethod
    def _asked(processor: ImageProcessor, side: int) -> None:
        with contextlib.suppress(RequestError):
            processor.layout(side, side)

    def test_extreme_sizes_are_served_or_refused(self) -> None:
        """Lines, huge and tiny images have a bounded layout or raise a RequestError, also when processed."""
        processor = self.processor()
        for width, height in EXTREME:
            if self.layout(processor, width, height) is not None or width * height > MAX_IMAGE_PIXELS // 256:
                continue
            with pytest.raises(RequestError):
                processor.process(self.image(width, height))

    def test_odd_values_are_served_or_refused(self) -> None:
        """A value of a configuration that it cannot serve is a ModelError, whatever its type and size."""
        for changed, is_config in self._odd_configs():
            config = {**self.config, **changed} if is_config else self.config
            preprocessor = self.preprocessor if is_config else {**self.preprocessor, **changed}
            try:
                made = self.plugin().from_config(config, preprocessor)
            except ModelError:
                continue
            except Exception as error:  # a stranger's code; the message says what it did
                fail(f"from_config raised {raised(error)} for {shown(changed)}; raise a ModelError that names the key")
            for width, height in ((56, 56), (640, 480), (8192, 8192)):
                self.layout(made, width, height)

    def _odd_configs(self) -> Iterator[tuple[dict[str, Any], bool]]:
        for given, is_config in ((self.preprocessor, False), (self.config, True)):
            for key, value in given.items():
                yield from (({key: odd}, is_config) for odd in ODD_VALUES)
                if isinstance(value, Mapping):
                    yield from (({key: {**value, inner: odd}}, is_config) for inner in value for odd in ODD_VALUES)

    def test_fingerprints_tell_arrays_apart(self) -> None:
        """Equal configurations have one fingerprint; where `changes` alter an image's arrays, it is another one."""
        base, image = self.processor(), self.image(333, 127)
        check(base.fingerprint() == self.processor().fingerprint(), "two processors of one model differ in fingerprint")
        for changed in self.changes:
            other = self.processor(changed)
            if not _same(self.arrays(base, image), self.arrays(other, image)):
                differs = base.fingerprint() != other.fingerprint()
                check(differs, f"{shown(dict(changed))} alters the arrays of an image, and not the fingerprint")


def _same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
