"""A tiny random Qwen2.5-VL behind `dovetail serve`: from the bytes of an image to tokens that equal transformers'."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gateway_process import Served
from PIL import Image
from seeing_server import data_url, write_seeing_model

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from families import SECTIONS, SIZES, perturb
from seeing import VISION

NUM = 12


def picture(width: int, height: int, seed: int) -> Image.Image:
    rng = np.random.default_rng((seed, width, height))
    return Image.fromarray(rng.integers(0, 255, (height, width, 3)).astype(np.uint8))


def url_of(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return data_url(file.getvalue())


class Reference:
    """The same checkpoint in transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

        write_seeing_model(folder)
        config = json.loads((folder / "config.json").read_text())
        first = config["image_token_id"] - 2
        ids = {"image_token_id": first + 2, "vision_start_token_id": first, "vision_end_token_id": first + 1}
        torch.manual_seed(0)
        text = {**SIZES, **SECTIONS, "vocab_size": first + 3, "max_position_embeddings": 1024}
        made = CONFIG_MAPPING["qwen2_5_vl"](
            text_config=text, vision_config=VISION["qwen2_5_vl"], **ids, video_token_id=first - 1
        )
        self.model = AutoModelForImageTextToText.from_config(made, attn_implementation="eager").float().eval()
        perturb(self.model)
        self.model.save_pretrained(folder)
        self.sizes = json.loads((folder / "preprocessor_config.json").read_text())

    def greedy(self, ids: list[int], images: list[Image.Image]) -> list[int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        sizes = {"shortest_edge": self.sizes["min_pixels"], "longest_edge": self.sizes["max_pixels"]}
        pixels = Qwen2VLImageProcessorPil(size=sizes)(images, return_tensors="pt")
        given = torch.tensor([ids])
        kinds = (given == self.model.config.image_token_id).long()
        with torch.no_grad():
            found = self.model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                mm_token_type_ids=kinds,
                max_new_tokens=NUM,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **pixels,
            )
        return found[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vl")


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def served(seeing: Reference, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    room = tmp_path_factory.mktemp("served")
    flags = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--page-size", "4")
    stored = ("--min-free-disk-bytes", "0", "--file-storage-path", str(room / "files"))
    running = Served(
        room, "serve", str(folder), *flags, *stored, "--max-total-tokens", "2048", "--grammar-backend", "none", key=None
    )
    try:
        yield running.wait()
    finally:
        running.close()


def ask(served: Served, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": NUM, "ignore_eos": True, "return_token_ids": True}
    reply = served.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def user(*parts: str | Image.Image, kind: str = "PNG") -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url_of(part, kind)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def test_tokens_are_those_of_transformers(served: Served, seeing: Reference) -> None:
    """Of one image and of two between texts, whatever lossless format they come in."""
    first, second = picture(57, 91, 1), picture(200, 31, 2)
    for parts in ((first,), ("a", first, "b", second, "c")):
        found = ask(served, [user(*parts)])
        images = [part for part in parts if isinstance(part, Image.Image)]
        expected = seeing.greedy(found["prompt_token_ids"], images)
        assert found["choices"][0]["token_ids"] == expected
        assert ask(served, [user(*parts, kind="WEBP")])["choices"][0]["token_ids"] == expected


def test_a_second_turn_finds_the_image(served: Served) -> None:
    """What was computed of an image is found again; another image of its size shares nothing behind it."""
    image, other = picture(143, 143, 3), picture(143, 143, 4)
    first = ask(served, [user(image, "What is this?")])
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"] or "x"}
    second = ask(served, [user(image, "What is this?"), said, user("And more?")])
    usage = second["usage"]
    assert (
        usage["prompt_tokens_details"]["image_tokens"] == first["usage"]["prompt_tokens_details"]["image_tokens"] > 20
    )
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.9 * first["usage"]["prompt_tokens"]
    third = ask(served, [user(other, "What is this?")])["usage"]
    assert third["prompt_tokens_details"]["cached_tokens"] < third["prompt_tokens_details"]["image_tokens"]
