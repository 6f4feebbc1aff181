"""Image processors with one fault each: the kit names every fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.contracts import ImageLayout, ImageProcessor, ModelError, RequestError
from dovetail_testing import check_class, conformance_class


class Right(ImageProcessor):
    """One token for each 16 x 16 pixels of a small copy."""

    placeholder_id = embed_id = 5
    side = 4
    state: ClassVar[list[Any]] = []

    @classmethod
    def from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Right:
        made = cls()
        made.side = preprocessor["side"]
        if type(made.side) is not int or not 0 < made.side < 65:
            raise ModelError(f"side {made.side!r}: possible: 1 to 64")
        return made

    def layout(self, width: int, height: int) -> ImageLayout:
        if max(width, height) > 200 * min(width, height):
            raise RequestError("too narrow")
        return self.of(self.side)

    def of(self, num: int) -> ImageLayout:
        return ImageLayout((5,) * num**2, (1, num, num), num**2)

    def process(self, image: Any) -> dict[str, Any]:
        self.layout(*image.size)
        return {"patches": np.asarray(image.resize((self.side * 16, self.side * 16)))}

    def fingerprint(self) -> str:
        return f"right {self.side}"


class Miscounts(Right):
    def layout(self, width: int, height: int) -> ImageLayout:
        found = super().layout(width, height)
        return found._replace(ids=found.ids[1:]) if width % 97 == 0 else found


class Counts32(Right):
    """Rounds where the reference does not."""

    def layout(self, width: int, height: int) -> ImageLayout:
        return self.of(self.side + (width % 301 == 0))


class Remembers(Right):
    """Adds up what it has seen."""

    def process(self, image: Any) -> dict[str, Any]:
        self.state.append(image)
        return {"patches": super().process(image)["patches"] + np.uint8(len(self.state))}


class Swaps(Right):
    """BGR in place of RGB."""

    def process(self, image: Any) -> dict[str, Any]:
        return {"patches": np.ascontiguousarray(super().process(image)["patches"][..., ::-1])}


class Loops(Right):
    """One operation for each row of the image."""

    def layout(self, width: int, height: int) -> ImageLayout:
        for _ in range(min(height, 10_000)):
            pass
        return super().layout(width, height)


class Divides(Right):
    """Fails for lines."""

    def layout(self, width: int, height: int) -> ImageLayout:
        1 // (height // (width // 64 or 1))
        return super().layout(width, height)


class Trusts(Right):
    @classmethod
    def from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Right:
        made = cls()
        made.side = int(preprocessor["side"])
        return made


class Forgets(Right):
    def fingerprint(self) -> str:
        return "forgets"


class Understates(Right):
    """The bound is that of most images."""

    def max_patches(self) -> int:
        return self.side**2

    def layout(self, width: int, height: int) -> ImageLayout:
        return self.of(self.side + (height % 301 == 0))


FAULTS = {
    "miscounts": (Miscounts, "test_layouts_are_sound", "embed_id stands 15 times in ids"),
    "rounds otherwise": (Counts32, "test_counts_equal_the_reference", "25 embeddings, 16 by the reference"),
    "remembers": (Remembers, "test_arrays_are_a_pure_function_of_the_image", "gives other arrays the second time"),
    "swaps colours": (Swaps, "test_arrays_equal_the_reference", "differs from the reference"),
    "understates its bound": (Understates, "test_layouts_are_sound", "25 patches, max_patches 16"),
    "loops": (Loops, "test_a_layout_costs_the_same_for_large_images", "operations for 64 x 64"),
    "divides by nothing": (Divides, "test_extreme_sizes_are_served_or_refused", "layout raised ZeroDivisionError"),
    "trusts a file": (Trusts, "test_odd_values_are_served_or_refused", "from_config raised ValueError"),
    "forgets an option": (Forgets, "test_fingerprints_tell_arrays_apart", "alters the arrays of an image, and not the"),
}


def right_arrays(self: Any, image: Any) -> Any:
    return Right.process(Right(), image)


ATTRS: dict[str, Any] = {
    "preprocessor": {"side": 4},
    "changes": [{"side": 5}],
    "num_sizes": 2000,
    "reference_count": lambda self, width, height: 16,
    "reference_arrays": right_arrays,
}


def test_a_right_processor_passes() -> None:
    """The processor that the faults are made from has none."""
    right = {**ATTRS, "reference_count": lambda self, width, height: _right_count(width, height)}
    report = check_class(conformance_class("processor", plugin_class=Right, **right))
    assert report.passed, report.text()


def _right_count(width: int, height: int) -> int:
    return Right().layout(width, height).num_embeds


@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_a_processors_fault(fault: str, caught: Callable[..., None]) -> None:
    """A processor with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    caught("processor", plugin, test, message, select=test, **ATTRS)
