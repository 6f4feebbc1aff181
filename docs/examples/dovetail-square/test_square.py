"""The conformance kit, and what this processor promises."""

from types import MappingProxyType

import pytest
from dovetail_square import Square

from dovetail_testing import ImageProcessorConformance

CONFIG = {"begin_image_token_id": 7, "image_token_id": 8, "end_image_token_id": 9}


class TestSquare(ImageProcessorConformance):
    name = "square"
    config = MappingProxyType(CONFIG)
    preprocessor = MappingProxyType({"image_size": 32, "patch_size": 8})
    changes = ({"image_size": 64}, {"patch_size": 16})


def test_the_middle_is_seen() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (64, 32), "red")
    image.paste("blue", (16, 0, 48, 32))
    patches = Square.from_config(CONFIG, {"image_size": 32, "patch_size": 8}).process(image)["patches"]
    assert set(map(tuple, patches.reshape(-1, 3).tolist())) == {(0, 0, 255)}
