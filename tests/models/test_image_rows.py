"""Token ids of images that are more than embeddings, and images of which nothing would be left."""

from __future__ import annotations

from typing import Any

import pytest
from image_references import PIXTRAL_CONFIG, PIXTRAL_PREPROCESSOR
from seeing import picture

from dovetail.contracts.errors import ModelError, RequestError
from dovetail_models.pixtral_images import PixtralImages

IMG, BREAK, END = 10, 12, 13


def pixtral(preprocessor: dict[str, Any] = PIXTRAL_PREPROCESSOR, **changes: Any) -> PixtralImages:
    return PixtralImages.from_config({**PIXTRAL_CONFIG, **changes}, preprocessor)


@pytest.mark.parametrize(("model_type", "unit"), [("mistral3", 28), ("llava", 14)])
def test_rows_end_with_a_break(model_type: str, unit: int) -> None:
    """A break stands behind each row, and the end in place of the last one, merged or not."""
    own = pixtral(model_type=model_type)
    for rows, columns in ((1, 1), (1, 5), (4, 1), (3, 7)):
        row = [IMG] * columns
        wanted = [*(row + [BREAK]) * (rows - 1), *row, END]
        for less in (0, unit - 1):
            found = own.layout(columns * unit - less, rows * unit - less)
            assert (list(found.ids), found.grid) == (wanted, (1, rows, columns))


def test_what_is_left_of_a_line_is_refused() -> None:
    """An image of which nothing would be left names both sizes."""
    own = pixtral({"size": {"longest_edge": 100}})
    with pytest.raises(RequestError, match="1 x 300 pixels becomes 0 x 100"):
        own.layout(1, 300)
    assert own.process(picture(3, 300))["grid"].tolist() == [1, 8, 2]


@pytest.mark.parametrize(
    ("config", "preprocessor", "message"),
    [
        (
            {"vision_config": {"model_type": "clip_vision_model"}},
            {},
            "model_type 'clip_vision_model'.*--processor none",
        ),
        ({}, {"patch_size": 16}, "has patch_size 16, the vision tower in config.json 14"),
        ({}, {"resample": 2}, "resample 2 is not supported; possible: 3"),
        ({}, {"size": {"longest_edge": 60000}}, "at most 131072 are possible"),
    ],
)
def test_what_pixtral_cannot_serve_is_refused(config: Any, preprocessor: Any, message: str) -> None:
    """The key and what is possible."""
    with pytest.raises(ModelError, match=message):
        pixtral(preprocessor, **config)
