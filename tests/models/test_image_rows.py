"""Token ids of images that are more than embeddings, and images of which nothing would be left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_references import (
    INTERNVL_CONFIG,
    INTERNVL_PREPROCESSOR,
    LLAMA4_CONFIG,
    LLAMA4_PREPROCESSOR,
    PIXTRAL_CONFIG,
    PIXTRAL_PREPROCESSOR,
    by_pillow,
    llama4,
)
from PIL import Image
from seeing import ODD, VISION, Prompts, make_vl, picture, processed, reference

from dovetail.contracts.errors import ModelError, RequestError
from dovetail_models.internvl_images import InternVLImages
from dovetail_models.llama4_images import Llama4Images
from dovetail_models.llama4_vl import Llama4_VL
from dovetail_models.pixtral_images import PixtralImages
from dovetail_models.seeing import Projector
from dovetail_testing.engine import make_core, serve, tokens

IMG, BREAK, END = 10, 12, 13


def pixtral(preprocessor: dict[str, Any] = PIXTRAL_PREPROCESSOR, **changes: Any) -> PixtralImages:
    return PixtralImages.from_config({**PIXTRAL_CONFIG, **changes}, preprocessor)


@pytest.mark.parametrize(("model_type", "unit"), [("mistral3", 28), ("llava", 14)])
def test_rows_end_with_a_break(model_type: str, unit: int) -> None:
    """A break stands behind each row, and the end in place of the last one, merged or not."""
    own = pixtral(model_type=model_type)
    for rows, columns in ((1, 1), (1, 5), (4, 1), (3, 7)):
        row = [IMG] * columns
        wanted = [*[*row, BREAK] * (rows - 1), *row, END]
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
            {"vision_config": {"model_type": "clip"}},
            {},
            "model_type 'clip'.*--processor none",
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


def test_an_activation_that_no_projector_has_is_refused() -> None:
    """The key, what it is and what is possible."""
    unused: Any = None
    with pytest.raises(ModelError, match=r"projector_hidden_act 'snake': possible: .*gelu"):
        Projector(8, 8, "snake", unused)


def test_tiles_stand_between_start_and_end() -> None:
    """One tile, or several and the whole image; all have 256 tokens."""
    own = InternVLImages.from_config(INTERNVL_CONFIG, INTERNVL_PREPROCESSOR)
    for size, tiles in (((448, 448), 1), ((30, 40), 13), ((896, 448), 3), ((1000, 90), 12)):
        found = own.layout(*size)
        assert found.ids == (151665, *[151667] * 256 * tiles, 151666)
        assert (found.grid, found.num_patches) == ((tiles, 16, 16), 1024 * tiles)


@pytest.mark.parametrize(
    ("config", "preprocessor", "message"),
    [
        ({}, {"image_mean": None}, "image_mean"),
        ({}, {"size": {"height": 224, "width": 224}}, "possible: 448 as height and as width"),
        ({}, {"min_patches": 9, "max_patches": 3}, "give no more as min_patches"),
        ({"downsample_ratio": 0.3}, {}, r"downsample_ratio 0.3: possible: 1, 0.5, 0.25"),
        ({"vision_config": {"image_size": [448, 224]}}, {}, r"image_size \[448, 224\]"),
        ({"vision_config": {"image_size": 450}}, {}, "must be a multiple of 28"),
        ({"start_image_token_id": None}, {}, "<img> in the tokenizer"),
    ],
)
def test_what_internvl_cannot_serve_is_refused(config: Any, preprocessor: Any, message: str) -> None:
    """The key and what is possible."""
    given = {key: value for key, value in {**INTERNVL_PREPROCESSOR, **preprocessor}.items() if value is not None}
    with pytest.raises(ModelError, match=message):
        InternVLImages.from_config({**INTERNVL_CONFIG, **config}, given)


SIZES = {(336, 336): (1, 1), (20, 30): (1, 1), (1000, 700): (3, 3), (90, 1500): (5, 1), (3000, 400): (2, 8)}
"""Rows and columns of tiles by width and height."""


@pytest.mark.parametrize("size", SIZES)
def test_tiles_of_llama_4_are_separated(size: tuple[int, int]) -> None:
    """As its processor writes them: separators between tiles and behind rows, and the whole image behind its mark."""
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    own = Llama4Images.from_config(LLAMA4_CONFIG, LLAMA4_PREPROCESSOR)
    rows, columns = SIZES[size]
    text = Llama4Processor._prompt_split_image(None, (rows, columns), 144)
    texts = {"<|image_start|>": 200080, "<|image_end|>": 200081, "<|patch|>": 200092, "<|image|>": 200090}
    texts |= {"<|tile_x_separator|>": 200084, "<|tile_y_separator|>": 200085}
    found = own.layout(*size)
    assert found.ids == tuple(texts[f"<|{name}|>"] for name in text.removeprefix("<|").removesuffix("|>").split("|><|"))
    tiles = rows * columns + (rows * columns > 1)
    assert (found.grid, found.num_patches) == ((tiles, 12, 12), 576 * tiles)


@pytest.mark.parametrize("enlarges", [False, True])
@pytest.mark.parametrize("most", [5, 16])
def test_sizes_in_tiles_are_those_of_transformers(most: int, enlarges: bool) -> None:
    """Which sizes its processor asks for, of images of 1 to 300 pixels in tiles of 28."""
    config = {**LLAMA4_CONFIG, "vision_config": {"image_size": 28, "patch_size": 7}}
    options = {"size": {"height": 28, "width": 28}, "max_patches": most, "resize_to_max_canvas": enlarges}
    own, rng = Llama4Images.from_config(config, {**LLAMA4_PREPROCESSOR, **options}), np.random.default_rng(3)
    asked: list[tuple[int, int]] = []

    def resize(images: torch.Tensor, high: int, wide: int) -> torch.Tensor:
        asked.append((int(wide), int(high)))
        return images.new_zeros((len(images), 3, high, wide))

    for size in rng.integers(1, 300, (400, 2)).tolist():
        asked.clear()
        _, shape = llama4(Image.new("RGB", tuple(size)), resize, 28, most, enlarges=enlarges)
        assert (shape, asked[0]) == (own.grid(*size), own.resized(*size)), size


@pytest.mark.parametrize("changes", [{"resize_to_max_canvas": True}, {"max_patches": 5}, {}])
def test_what_tiles_of_llama_4_leave_free_is_black(changes: dict[str, Any]) -> None:
    """An image keeps its shape; it grows to a tile at most, or with `resize_to_max_canvas` to all tiles."""
    own = Llama4Images.from_config(LLAMA4_CONFIG, {**LLAMA4_PREPROCESSOR, **changes})
    for width, height in ((40, 100), (500, 300), (700, 900), (2000, 150), (3, 800)):
        image = Image.new("RGB", (width, height), (255, 255, 255))
        found = own.process(image)
        wide, high = own.resized(width, height)
        rows, columns = own.grid(width, height)
        pixels = found["patches"].reshape(-1, 24, 24, 3, 14, 14).transpose(0, 1, 4, 2, 5, 3).reshape(-1, 336, 336, 3)
        canvas = pixels[: rows * columns].reshape(rows, columns, 336, 336, 3).swapaxes(1, 2)
        canvas = canvas.reshape(rows * 336, columns * 336, 3)
        assert canvas[:high, :wide].min() == 255
        assert not canvas[high:].any()
        assert not canvas[:, wide:].any()
        most, enlarges = changes.get("max_patches", 16), "resize_to_max_canvas" in changes
        tiles, shape = llama4(image, by_pillow, most=most, enlarges=enlarges)
        assert (shape, len(tiles.flatten(0, -4))) == ((rows, columns), len(pixels))
        assert (tiles.flatten(0, -4).permute(0, 2, 3, 1).numpy() == pixels).all()


@pytest.mark.parametrize(
    ("config", "preprocessor", "message"),
    [
        ({}, {"image_mean": [0.4, 0.4, 0.4]}, "image_mean"),
        ({}, {"resample": 3}, "resample 3 is not supported; possible: 2"),
        ({}, {"size": {"height": 224, "width": 224}}, "possible: 336 as height and as width"),
        ({}, {"max_patches": 0}, "max_patches 0"),
        ({}, {"resize_to_max_canvas": "no"}, "resize_to_max_canvas 'no': possible: true, false"),
        ({"vision_config": {"image_size": 336, "pixel_shuffle_ratio": 0.3}}, {}, "pixel_shuffle_ratio 0.3: possible"),
        ({"vision_config": {"image_size": 4088}}, {}, "give tiles of at most 131072"),
        ({"row_end_token_id": None}, {}, r"<\|tile_y_separator\|> in the tokenizer"),
    ],
)
def test_what_the_images_of_llama_4_cannot_have_is_refused(config: Any, preprocessor: Any, message: str) -> None:
    """The key and what is possible."""
    given = {**LLAMA4_PREPROCESSOR, **preprocessor}
    if (side := config.get("vision_config", {}).get("image_size")) not in (None, 336):
        given["size"] = {"height": side, "width": side}
    with pytest.raises(ModelError, match=message):
        Llama4Images.from_config({**LLAMA4_CONFIG, **config}, given)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act 'silu'.*possible: 'gelu'"),
        ({"projector_input_dim": 24}, "projector_input_dim 24.*possible: 40"),
        ({"vision_output_dim": 24}, "vision_output_dim 24.*possible: 40"),
        ({"intermediate_size": 48}, "intermediate_size 48: possible: 128"),
        ({"num_attention_heads": 16}, "a head must have a multiple of four numbers"),
    ],
)
def test_a_tower_that_llama_4_cannot_have_is_refused(vision: dict[str, Any], message: str) -> None:
    """The key and what is possible."""
    with pytest.raises(ModelError, match=message):
        Llama4_VL.seen_facts({"vision_config": {**VISION["llama4"], **vision}})


@pytest.mark.parametrize("vision", [{"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}])
def test_the_larger_tower_is_transformers(tmp_path: Path, vision: dict[str, Any]) -> None:
    """InternViT of the largest models: RMS norms, also of queries and keys, and no bias on these."""
    theirs = make_vl(tmp_path / "model", "internvl", vision)
    core, prompts = make_core(tmp_path / "model"), Prompts(tmp_path / "model", tmp_path / "files")
    for size in ODD:
        image = picture(*size)
        arrays = {name: torch.from_numpy(array) for name, array in prompts.processor.process(image).items()}
        wanted = theirs.get_image_features(**processed(theirs, [image])).pooler_output.flatten(0, 1)
        found = core.executor.runner.model.encode(arrays)[0]  # type: ignore[attr-defined]
        assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


def test_ministral_is_transformers(tmp_path: Path) -> None:
    """Mistral 3's tower before a decoder whose queries grow with their positions, across breaks and chunks."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
    theirs = make_vl(tmp_path / "model", "mistral3", model_type="ministral3", rope_parameters=rope)
    parts: list[Any] = [[3, 9, 14], picture(57, 91), [5, 6], picture(143, 143, 1), [7]]
    submit = Prompts(tmp_path / "model", tmp_path / "files").submit(parts)
    [found] = serve(tmp_path / "model", [submit], page_size=4, chunked_prefill_size=9)
    assert tokens(found) == reference(theirs, parts, submit)
