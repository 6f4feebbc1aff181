"""Token ids of prompts with images equal those of transformers' processor for Gemma 3."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer as Fast
from tokenizers import models

from dovetail.contracts.processor import ImageProcessor
from dovetail.processing.image_parts import surrounded
from dovetail.processing.images import PreparedImage, expand
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_models.gemma3_images import Gemma3Images

SPECIAL = ["<start_of_image>", "<end_of_image>", "<image_soft_token>", "<pad>"]
BOI, EOI, SOFT = 40, 41, 42
LETTERS = "abcdefgh "
PIXELS = ((57, 91), (200, 31))


def write_tokenizer(folder: Path) -> Any:
    """Letters, and line breaks that join up to four as Gemma's do; transformers' tokenizer of it."""
    from transformers import PreTrainedTokenizerFast

    breaks = ["\n" * num for num in range(1, 5)]
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n"), ("\n\n\n", "\n")]
    vocab = {piece: at for at, piece in enumerate([*LETTERS, *breaks])}
    vocab |= {f"<unused{at}>": at for at in range(len(vocab), BOI)}
    made = Fast(models.BPE(vocab=vocab, merges=merges))
    made.add_special_tokens(SPECIAL)
    made.save(str(folder / "tokenizer.json"))
    names = {"boi_token": SPECIAL[0], "eoi_token": SPECIAL[1], "image_token": SPECIAL[2]}
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", extra_special_tokens=names)


def our_ids(folder: Path, images: ImageProcessor, text: str, sizes: Sequence[tuple[int, int]]) -> list[int]:
    tools: Any = SimpleNamespace(tokenizer=Tokenizer.load(folder), images=images)
    ids = tools.tokenizer.encode(surrounded(tools, text), add_special_tokens=False)
    prepared = [PreparedImage(width=w, height=h, digest=bytes(32), file="", arrays=()) for w, h in sizes]
    return expand(list(ids), images, prepared).ids


@pytest.mark.parametrize("text", ["a\n{}b", "{}", "{}{}", "a {} b\n\n{}\nc", "\n\n{}\n\n\n{}"])
def test_ids_are_transformers(text: str, tmp_path: Path) -> None:
    """Of images at the beginning, the end, side by side and between line breaks, which the tokenizer joins."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    theirs = write_tokenizer(tmp_path)
    text = text.replace("{}", SPECIAL[0])
    sizes = PIXELS[: text.count(SPECIAL[0])]
    keys = {"boi_token_index": BOI, "eoi_token_index": EOI, "image_token_index": SOFT, "mm_tokens_per_image": 16}
    ours = Gemma3Images.from_config({**keys, "vision_config": {"image_size": 56, "patch_size": 7}}, {})
    pixels = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    processor: Any = Gemma3Processor(pixels, theirs, image_seq_length=16)
    images = [Image.fromarray(np.zeros((high, wide, 3), np.uint8)) for wide, high in sizes]
    wanted = processor(text=[text], images=[images], add_special_tokens=False)["input_ids"][0]
    assert our_ids(tmp_path, ours, text, sizes) == list(wanted)
