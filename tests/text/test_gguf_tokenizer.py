"""Tokenizers out of GGUF files: ids of the folder that they were made from, and of SentencePiece's own algorithm."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.errors import ModelError
from dovetail.demo import MODEL_DIR
from dovetail.sdk.pieces import merges_of
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_backends.gguf.reader import read_files
from dovetail_backends.gguf.tokenizer import backend_of

TEXTS = (
    "Hello world",
    " two  spaces\n\n and lines\t",
    "it's 12345 o'clock, ÜBER-straße 東京 🙂",
    "",
    "<|im_start|>user\nHi<|im_end|>",
)


def write(file: Path, values: Mapping[str, Any], *, architecture: str = "qwen2") -> Path:
    """Write a file of metadata and one small embedding, by hand."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def one(value: Any) -> bytes:
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, bool):
            return struct.pack("<I?", 7, value)
        if isinstance(value, int):
            return struct.pack("<Ii", 5, value)
        kind, form = (8, "") if isinstance(value[0], str) else (6, "f") if isinstance(value[0], float) else (5, "i")
        data = b"".join(text(each) if kind == 8 else struct.pack(f"<{form}", each) for each in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + data

    keys = {"general.architecture": architecture, **values}
    body = (
        b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + b"".join(text(key) + one(value) for key, value in keys.items())
    )
    body += text("token_embd.weight") + struct.pack("<IQQIQ", 2, 1, 1, 0, 0)
    file.write_bytes(body + b"\0" * (-len(body) % 32 + 4))
    return file


def folder_keys(folder: Path, **values: Any) -> dict[str, Any]:
    """Return the keys of a folder's byte-level tokenizer."""
    import json

    made = json.loads((folder / "tokenizer.json").read_text())
    vocab = made["model"]["vocab"] | {token["content"]: token["id"] for token in made["added_tokens"]}
    special = {token["content"]: token["special"] for token in made["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    assert [vocab[token] for token in tokens] == list(range(len(tokens)))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in made["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [{None: 1, True: 3, False: 4}[special.get(token)] for token in tokens],
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.{key}": value for key, value in values.items()},
    }


def test_a_byte_level_tokenizer_is_that_of_its_folder(tmp_path: Path) -> None:
    """Ids, text back, special tokens, ends and the chat template."""
    own = Tokenizer.load(MODEL_DIR)
    eos = own.special_tokens["eos_token"]
    template = own.files.chat_templates["default"]
    values = {"chat_template": template, "chat_template.tool_use": "x", "ggml.eos_token_id": own.added_tokens[eos]}
    made = Tokenizer.load(write(tmp_path / "t.gguf", folder_keys(MODEL_DIR, **values)))
    for text in (*TEXTS, template):
        ids = made.encode(text, add_special_tokens=True)
        assert ids == own.encode(text, add_special_tokens=True)
        assert made.decode(ids, skip_special_tokens=False) == own.decode(ids, skip_special_tokens=False)
        assert made.decode(ids, skip_special_tokens=True) == own.decode(ids, skip_special_tokens=True)
    assert (made.vocab_size, made.special_ids, made.added_tokens) == (own.vocab_size, own.special_ids, own.added_tokens)
    assert made.files.chat_templates == {"default": template, "tool_use": "x"}
    assert own.added_tokens[eos] in made.eos_token_ids
    chat = [{"role": "user", "content": "hi"}]
    assert ChatTemplate.load(made.files).render(chat).text == ChatTemplate.load(own.files).render(chat).text


def test_a_file_says_what_stands_around_a_text(tmp_path: Path) -> None:
    """BOS and EOS are added as the flags say, and never to what a template wrote."""
    own = Tokenizer.load(MODEL_DIR)
    ids = {"ggml.bos_token_id": 4087, "ggml.eos_token_id": 4089}
    plain = own.encode("Hi", add_special_tokens=False)
    for flags, want in (
        ({}, plain),
        ({"ggml.add_bos_token": True}, [4087, *plain]),
        ({"ggml.add_eos_token": True}, [*plain, 4089]),
        ({"ggml.add_bos_token": True, "ggml.add_eos_token": True}, [4087, *plain, 4089]),
        ({"ggml.pre": "llama-bpe"}, [4087, *plain]),
        ({"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}, plain),
    ):
        made = Tokenizer.load(write(tmp_path / "t.gguf", folder_keys(MODEL_DIR, **ids, **flags)))
        assert made.encode("Hi", add_special_tokens=True) == want, flags
        assert made.encode("Hi", add_special_tokens=False) == plain
    with pytest.raises(ModelError, match="is to add bos_token, and does not say which token it is"):
        Tokenizer.load(write(tmp_path / "t.gguf", folder_keys(MODEL_DIR, **{"ggml.add_bos_token": True})))


def test_the_end_of_a_turn_is_found_without_its_key(tmp_path: Path) -> None:
    """As llama.cpp finds it: a control token of a known text; a file that names one is believed."""
    end = Tokenizer.load(MODEL_DIR).added_tokens["<|im_end|>"]
    keys = folder_keys(MODEL_DIR, **{"ggml.eos_token_id": 4087})
    assert Tokenizer.load(write(tmp_path / "t.gguf", keys)).eos_token_ids == (4087, end)
    keys |= {"tokenizer.ggml.eot_token_id": 5}
    assert Tokenizer.load(write(tmp_path / "t.gguf", keys)).eos_token_ids == (4087, 5)


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = [*"▁abcde", "ab", "bc", "cd", "de", "▁a", "▁b", "abc", "cde", "▁ab", "▁abc", "abcd", "bcde", "▁▁", "e▁"]
WORDS += ["de▁a", "dd", "ddd", "dddd"]


def sentencepiece(**values: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the keys of a small SentencePiece vocabulary, and the scores of its pieces."""
    rng = random.Random(1)
    order = rng.sample(WORDS, len(WORDS))
    tokens = [*PIECES, *order, "<tool>", "  x"]
    scores = [0.0] * len(PIECES) + [-float(index) for index in range(len(order))] + [0.0, 0.0]
    types = [2, 3, 3, *[6] * 256, *[1] * len(order), 3, 4]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.{key}": value for key, value in values.items()},
    }
    return keys, dict(zip(order, scores[len(PIECES) :], strict=False))


def by_score(text: str, scores: Mapping[str, float]) -> list[str]:
    """Join the two neighbours whose piece has the best score, the leftmost first, until there are none."""
    parts = list(text)
    while True:
        found = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not found:
            return parts
        index = min(found)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


def test_pieces_are_joined_as_sentencepiece_joins_them(tmp_path: Path) -> None:
    """Against the algorithm in plain words, over a thousand texts; other characters are bytes."""
    keys, scores = sentencepiece()
    made = Tokenizer.load(write(tmp_path / "t.gguf", keys, architecture="llama"))
    ids = {token: index for index, token in enumerate(keys["tokenizer.ggml.tokens"])}
    rng = random.Random(2)
    for _ in range(1000):
        text = "".join(rng.choice("aabbccddee  é") for _ in range(rng.randint(1, 24)))
        want: list[int] = [1]
        for part in by_score("▁" + text.replace(" ", "▁"), scores):
            want += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        got = made.encode(text, add_special_tokens=True)
        assert got == want, text
        assert made.decode(got, skip_special_tokens=True) == text
    assert made.encode("ab<tool>  xcd", add_special_tokens=False) == [
        *made.encode("ab", add_special_tokens=False),
        ids["<tool>"],
        ids["  x"],
        *made.encode("cd", add_special_tokens=False),
    ]


def test_gemma_has_no_space_in_front_and_merges_in_the_order_of_its_tokens(tmp_path: Path) -> None:
    """Its scores say nothing of the order."""
    keys, scores = sentencepiece(**{"ggml.add_space_prefix": False})
    keys["tokenizer.ggml.scores"] = [-1000.0] * len(keys["tokenizer.ggml.tokens"])
    made = Tokenizer.load(write(tmp_path / "t.gguf", keys, architecture="gemma3"))
    ids = {token: index for index, token in enumerate(keys["tokenizer.ggml.tokens"])}
    for text in ("abcde", " abcd", "dddd e  a"):
        want = [ids[part] for part in by_score(text.replace(" ", "▁"), scores)]
        assert made.encode(text, add_special_tokens=False) == want
        assert made.decode(want, skip_special_tokens=False) == text


@pytest.mark.full
def test_merges_of_a_large_vocabulary_take_seconds() -> None:
    """Its size is Gemma's: 256,000 pieces."""
    import time

    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz▁"
    pieces = list(
        dict.fromkeys([*letters, *("".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(256_000))])
    )
    started = time.process_time()
    merges = merges_of({piece: index for index, piece in enumerate(pieces)}, [-index for index in range(len(pieces))])
    assert time.process_time() - started < 20
    assert len(merges) > 1000


def test_pieces_that_all_join_are_refused_before_they_take_time_and_memory() -> None:
    """Two megabytes of `a` in pieces of all lengths would take 20 s and 3.6 GB; a vocabulary's pieces are short."""
    pieces = {"a" * size: size for size in range(1, 2000)}
    with pytest.raises(ValueError, match="1,999 pieces, of up to 1,999 characters, join in too many ways"):
        merges_of(pieces, [0.0] * 2000)
    pieces = {"a" * size: size for size in range(1, 100)}
    assert len(merges_of(pieces, [0.0] * 100)) == 99 * 98 // 2


def test_a_piece_of_a_million_characters_is_cut_where_pieces_end() -> None:
    """To cut it everywhere takes the square of its length, minutes; an empty piece makes nothing of anything."""
    huge = "a" * 1_000_000
    pieces = {"": 0, "a": 1, "aa": 2, huge[1:]: 3, huge: 4}
    merges = [(len(left), len(right)) for left, right in merges_of(pieces, [-index for index in range(5)])]
    assert merges == [(1, 1), (1, 999_999), (999_999, 1)]


def test_what_cannot_be_made_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Ways of cutting text, merges and lists that do not go together."""
    for change, match in (
        ({"ggml.pre": "acme"}, "tokenizer.ggml.pre = 'acme' says; possible: default, llama-bpe"),
        ({"ggml.merges": ["a zzzzzz"]}, "has the merge 'a zzzzzz', and not both of its parts"),
        ({"ggml.merges": ["whole"]}, "has the merge 'whole ', and not both of its parts"),
        ({"ggml.merges": ["Q ~"]}, "has the merge 'Q ~', and not what they make as tokens"),
    ):
        gguf = read_files((write(tmp_path / "t.gguf", folder_keys(MODEL_DIR, **change)),))
        assert gguf is not None
        with pytest.raises(ModelError, match=match) as error:
            backend_of(gguf)
        assert "--tokenizer-path" in str(error.value)
