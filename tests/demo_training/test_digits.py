"""What trains the model that reads numbers in images: its pictures, its conversations and its network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from demo_training.digits import fonts, train
from demo_training.digits.dialogue import MARKERS, NO_IMAGE, VOCAB, Turn, Writer, make_tokenizer
from demo_training.digits.network import MERGE, PATCH, Reader, Shape
from demo_training.digits.pictures import NOTHING, draw, number, shape
from demo_training.digits.strokes import LABELS, Painter, draw_strokes
from dovetail.demo import DIGITS_DIR, MODEL_DIR

SMALL = Shape(width=32, tower_layers=2, tower_inner=32, layers=1, inner=32, heads=2, head_dim=16)


@pytest.fixture
def letters(tmp_path: Path) -> list[list[Path]]:
    """A font file that comes with Pillow."""
    source: Any = ImageFont.load_default(20)
    source.path.seek(0)
    path = tmp_path / "Own.ttf"
    path.write_bytes(source.path.read())
    return [[path]]


def test_no_family_is_both_trained_on_and_held_out() -> None:
    """Neither a package nor a file stands on both sides."""
    assert not fonts.TRAINED.keys() & fonts.HELD_OUT.keys()
    sides = [{stem for stems in side.values() for stem in stems} for side in (fonts.TRAINED, fonts.HELD_OUT)]
    assert not sides[0] & sides[1]


def test_a_missing_font_names_its_package(tmp_path: Path) -> None:
    """What to install stands in the message."""
    with pytest.raises(FileNotFoundError, match="install fonts-adf-baskervald, or give --fonts"):
        fonts.families(fonts.HELD_OUT, tmp_path)


def test_pictures_are_those_of_their_seed(letters: list[list[Path]]) -> None:
    """The same seed draws the same image, another one another; without a number there is only the ground."""

    def made(seed: int) -> Image.Image:
        rng = np.random.default_rng(seed)
        return draw(rng, number(rng), letters, shape(rng, 60, 400))

    assert made(1).tobytes() == made(1).tobytes() != made(2).tobytes()
    plain = np.asarray(draw(np.random.default_rng(3), "", letters, (80, 60)), np.float32)
    inked = np.asarray(draw(np.random.default_rng(3), "8", letters, (80, 60)), np.float32)
    assert plain.shape == inked.shape == (60, 80, 3)
    assert inked.std() > plain.std()


def test_labels_are_where_the_digits_are(letters: list[list[Path]]) -> None:
    """Every digit labels a patch, in their order from left to right; a picture of nothing has no label."""
    strokes = draw_strokes(np.random.default_rng(0), letters, 40)
    painter = Painter(strokes, 0)
    pixels, labels = painter.paint(torch.arange(-1, 40), (168, 168), 4)
    assert pixels.shape == (41, 3, 168, 168)
    assert (labels[0] == torch.tensor(LABELS)[:, None, None] - 1).all()
    labels, slots, left = labels.unbind(1)
    for at in range(40):
        text = painter.text(at)
        columns = [(labels[at + 1] == int(digit)).any(0).nonzero().flatten().float().mean() for digit in text]
        if len(set(text)) == len(text):
            assert columns == sorted(columns)
        assert {*labels[at + 1].unique().tolist()} == {NOTHING, *map(int, text)}
        assert {*slots[at + 1].unique().tolist()} == {*left[at + 1].unique().tolist()} == {*range(len(text)), 4}


def test_the_tokenizer_is_the_beginning_of_the_demo_models() -> None:
    """Any text survives; markers are single tokens."""
    tokenizer = make_tokenizer()
    assert tokenizer.get_vocab_size() == VOCAB
    for said in ("Which number is this?", "naïve 日本語 🙂", "a\n\n b"):
        assert tokenizer.decode(tokenizer.encode(said).ids) == said
    assert [len(tokenizer.encode(marker).ids) for marker in MARKERS] == [1] * len(MARKERS)
    whole = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert [whole.decode(i) for i in whole("3057").input_ids] == [
        tokenizer.decode([i]) for i in tokenizer.encode("3057").ids
    ]


def test_rows_are_what_the_template_writes() -> None:
    """Two turns, with a system prompt: the ids of a row are those of the rendered conversation."""
    tokenizer = AutoTokenizer.from_pretrained(DIGITS_DIR)
    turns = [Turn("Which number is this?", "42"), Turn("And?", NO_IMAGE, has_image=False)]
    batch = Writer(make_tokenizer()).batch([turns], (1, 1), ["Be brief."])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": turns[0].ask}]},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": NO_IMAGE},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(batch.ids[0]) == rendered.removesuffix("\n")
    learned = batch.targets[0][batch.targets[0] >= 0]
    assert tokenizer.decode(learned) == f"42<|im_end|>{NO_IMAGE}<|im_end|>"


def test_an_export_computes_the_same(tmp_path: Path) -> None:
    """transformers loads the checkpoint unchanged; its logits of a talk about two images are the trainer's."""
    torch.manual_seed(0)
    reader = Reader(SMALL, make_tokenizer()).eval()
    with torch.no_grad():
        for value in reader.model.parameters():
            value.copy_((value + torch.randn_like(value) * 0.05).bfloat16())
    train.export(reader, tmp_path, SMALL)
    model, report = Qwen3VLForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    grid = (8, 4)
    batch = Writer(make_tokenizer()).batch([[Turn("Read this.", "12"), Turn("And?", "3")]], (4, 2))
    patches = torch.randint(0, 256, (2, 32, 3 * PATCH**2))
    values = (patches.view(-1, 3, 1, PATCH**2) / 127.5 - 1).expand(-1, -1, 2, -1).flatten(1)
    with torch.inference_mode():
        ours, _ = reader(batch, patches, grid)
        kinds = (batch.ids == reader.model.config.image_token_id).int()
        theirs = model(
            input_ids=batch.ids,
            mm_token_type_ids=kinds,
            pixel_values=values,
            image_grid_thw=torch.tensor([[1, *grid]] * 2),
        ).logits
    assert kinds.sum() == 2 * 32 // MERGE**2
    torch.testing.assert_close(ours, theirs[batch.targets >= 0], atol=2e-4, rtol=1e-3)


@pytest.mark.full
def test_two_steps_of_training(letters: list[list[Path]], tmp_path: Path) -> None:
    """It writes a checkpoint that transformers loads, with files for a server, and goes on from it."""
    out = tmp_path / "out"
    given = ["--out", str(out), "--fonts", str(letters[0][0].parent), "--steps", "2", "--rows", "4", "--every", "1"]
    given += ["--check", "2", "--strokes", "20", "--any-fonts"]
    train.main(given)
    assert json.loads((out / "preprocessor_config.json").read_text())["patch_size"] == PATCH
    before = Qwen3VLForConditionalGeneration.from_pretrained(out).state_dict()
    train.main([*given, "--from", str(out)])
    after = Qwen3VLForConditionalGeneration.from_pretrained(out).state_dict()
    assert any(not torch.equal(value, after[name]) for name, value in before.items())
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in DIGITS_DIR.iterdir()}
