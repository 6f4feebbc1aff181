"""Prompts with images: the model's processor is found, and its ids stand in place of placeholders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts import ImageLayout, ImageProcessor
from dovetail.contracts.errors import ModelError, RequestError
from dovetail.messages.media import MediaSpan
from dovetail.plugins import Registry, load, make_plan
from dovetail.processing.images import PreparedImage, expand, make_image_processor, preprocessor_config
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail_server.media.rules import layout_of


class Rows(ImageProcessor):
    """Rows of tokens with a break behind each."""

    placeholder_id, embed_id = 7, 8

    @classmethod
    def from_config(cls, config: Any, preprocessor: Any) -> Rows:
        return cls()

    def layout(self, width: int, height: int) -> ImageLayout:
        if width > 100:
            raise RequestError("at most 100 wide")
        return ImageLayout((*[8] * width, 9) * height, (1, height, width), width * height)

    def process(self, image: Any) -> Any:
        return {}

    def fingerprint(self) -> str:
        return ""


def image(width: int, height: int) -> PreparedImage:
    return PreparedImage(width=width, height=height, digest=bytes([width]) * 32, file=f"/f{width}", arrays=())


def span(start: int, num: int, grid: tuple[int, int, int], first: int = 0) -> MediaSpan:
    width = grid[2]
    return MediaSpan(
        start=start, num=num, first=first, grid=grid, num_patches=grid[1] * width, digest=bytes([width]) * 32,
        file=f"/f{width}", arrays=(),
    )  # fmt: skip


def test_ids_of_images_stand_in_place_of_placeholders() -> None:
    """Text around images stays; each span says where its image begins and how long it is, one for each row of it."""
    found = expand([1, 7, 2, 7, 7], Rows(), [image(2, 1), image(1, 2), image(3, 1)])
    assert found.ids == [1, 8, 8, 9, 2, 8, 9, 8, 9, 8, 8, 8, 9]
    column = (1, 2, 1)
    assert found.media == (span(1, 2, (1, 1, 2)), span(5, 1, column), span(7, 1, column, 1), span(9, 3, (1, 1, 3)))
    assert expand([1, 2], Rows(), []) == ([1, 2], ())


@pytest.mark.parametrize("num", [0, 1, 3])
def test_an_image_that_the_template_does_not_show_is_refused(num: int) -> None:
    """As many placeholders as images, or the model would see one image in place of another."""
    with pytest.raises(RequestError, match=f"has 2 image placeholders for {num} images") as caught:
        expand([7, 1, 7], Rows(), [image(2, 1)] * num)
    assert caught.value.code == "invalid_image"


def test_a_refused_size_names_the_part() -> None:
    """A client learns which of its parts is meant."""
    with pytest.raises(RequestError, match="at most 100 wide") as caught:
        layout_of(Rows(), 101, 1, "messages[0].content[2]")
    assert (caught.value.param, caught.value.code) == ("messages[0].content[2]", "invalid_image")
    assert layout_of(Rows(), 2, 1, "").num_embeds == 2


def test_a_models_processor_is_found(tmp_path: Path) -> None:
    """A named processor reads both files of the folder; without one, there is none."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "image_token_id": 3}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 3136}))
    registry, model = Registry.scan(), ModelFolder(tmp_path, weights=False)
    found = make_image_processor(load(make_plan(registry, processor="qwen2-vl"), "api"), model, {})
    assert found is not None
    assert (found.placeholder_id, found.layout(999, 999).num_embeds) == (3, 4)
    assert make_image_processor(load(make_plan(registry), "api"), model, {}) is None
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"patch_size": 16}}))
    assert preprocessor_config(tmp_path) == {"patch_size": 16}
    with pytest.raises(ModelError, match=r"has patch_size 16, the vision tower in config\.json 14"):
        make_image_processor(load(make_plan(registry, processor="qwen2-vl"), "api"), model, {})


def test_a_tokenizer_names_ids_that_the_config_lacks(tmp_path: Path) -> None:
    """A processor gets the ids of the tokens that it names; a config's own id holds, and a missing token is named."""
    config = {"architectures": ["X"], "model_type": "mistral3", "image_token_index": 3, "image_end_token_id": 6}
    model = ModelFolder(tmp_path, weights=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    plugins = load(make_plan(Registry.scan(), processor="pixtral"), "api")
    found = make_image_processor(plugins, model, {"[IMG_BREAK]": 4, "[IMG_END]": 5})
    assert found is not None
    assert found.layout(56, 56).ids == (3, 3, 4, 3, 3, 6)
    with pytest.raises(ModelError, match=r"image_break_token_id None.*\[IMG_BREAK\] in the tokenizer"):
        make_image_processor(plugins, model, {})


@pytest.mark.parametrize(("vision", "names"), [("pixtral", ["pixtral"]), ("clip_vision_model", []), ("", ["pixtral"])])
def test_auto_goes_by_the_tower(vision: str, names: list[str]) -> None:
    """Models of one class may have several towers; a processor is chosen for the one that it serves."""
    architecture = "LlavaForConditionalGeneration"
    plan = make_plan(
        Registry.scan(), model=architecture, vision=vision, attention_backend="torch_native", processor="auto"
    )
    assert [planned.name for planned in plan.of_kind("processor")] == names
