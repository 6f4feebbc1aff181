"""A folder with nothing but `tokenizer.model` is read as SentencePiece reads it."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.errors import ModelError
from dovetail.text.tokenizer.ends import end_ids
from dovetail.text.tokenizer.tokenizer import Tokenizer

MODELS = Path(__file__).parent / "spm"
"""Two tiny models of `sentencepiece` 0.2.3, and what its own library encodes with them: `bpe` as Llama 2's is trained,
`plain` as Gemma's, without a space in front of a text and with tokens that a user defined."""
ENCODED: dict[str, dict[str, list[int]]] = json.loads((MODELS / "encoded.json").read_text())
FILE = "tokenizer.model"


def folder_of(folder: Path, model: str = "bpe", **files: Any) -> Path:
    """Write a folder with a model and other files."""
    shutil.copy(MODELS / f"{model}.model", folder / FILE)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("model", ENCODED)
def test_ids_are_sentencepieces_own(model: str, tmp_path: Path) -> None:
    """Spaces, bytes, tokens that a user defined; and back."""
    tokenizer = Tokenizer.load(folder_of(tmp_path, model))
    found = {text: tokenizer.encode(text, add_special_tokens=False) for text in ENCODED[model]}
    assert found == ENCODED[model]
    texts = {text: tokenizer.decode(ids, skip_special_tokens=True) for text, ids in found.items()}
    assert texts == {text: text.replace("▁", " ") for text in found}


def test_special_tokens_come_from_the_model(tmp_path: Path) -> None:
    """BOS in front, the end of a reply; a configuration wins where it is there, and added tokens follow the pieces."""
    folder = folder_of(tmp_path)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.encode("the", add_special_tokens=True)[0] == 1
    assert tokenizer.eos_token_ids == end_ids(TokenizerFiles.read(folder, folder)) == (2,)
    size, config = tokenizer.vocab_size, {"eos_token": "<end>", "add_bos_token": False, "add_eos_token": True}
    tokenizer = Tokenizer.load(folder_of(tmp_path, tokenizer_config=config, added_tokens={"<end>": size}))
    assert tokenizer.eos_token_ids == end_ids(TokenizerFiles.read(folder, folder)) == (size,)
    ids = tokenizer.encode("the<end>", add_special_tokens=True)
    assert (ids[0] != 1, ids[-2:]) == (True, [size, 2])


BPE = (MODELS / "bpe.model").read_bytes()
BROKEN: dict[str, tuple[bytes, str]] = {
    "cut short": (BPE[:-3], "not a SentencePiece model that can be read"),
    "another format": (b"PK\3\4" * 50, "not a SentencePiece model"),
    "a number for a text": (b"\x08\x05", "a number stands where text should"),
    "a number without an end": (b"\xff" * 11, "does not end"),
    "nothing": (b"", "is empty; download it again"),
    "a pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
        "a Git LFS pointer.*git lfs pull",
    ),
    "a piece twice": (BPE + b"\x0a\x05\x0a\x03<s>", "a piece is there twice"),
    "Unigram": (BPE + b"\x12\x02\x18\x01", "is a Unigram model; .*--tokenizer-path"),
    "a broken table": (BPE + b"\x1a\x06\x12\x04\xff\xff\xff\xff", "its table of characters is broken"),
    "tiktoken": (base64.b64encode(b"the") + b" 0\n" + base64.b64encode(b"fox") + b" 1\n", "tiktoken.*--tokenizer-path"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_told_as_what_it_is(name: str, tmp_path: Path) -> None:
    """One line, with what to do."""
    data, message = BROKEN[name]
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tiktoken.model", "spiece.model"])
def test_formats_that_hold_less_are_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    """Another library would not help: how text is cut stands in code of the model's."""
    (tmp_path / name).write_bytes(b"dGhl 0\n")
    with pytest.raises(ModelError, match=f"{name} alone does not say how text is cut; .*--tokenizer-path"):
        Tokenizer.load(tmp_path)
