"""Long texts are tokenized in pieces, and have the tokens that they have as a whole."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.demo import MODEL_DIR
from dovetail.text.tokenizer import cuts
from dovetail.text.tokenizer.cuts import KNOWN_IDS, PIECE, KnownPieces, cuts_of, pieces, shared
from dovetail.text.tokenizer.tokenizer import MOST_KEPT, WHOLE, Tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
ATOMS = [
    *(
        "a",
        "b c",
        "The",
        " quick",
        " x",
        "  ",
        " ",
        "\n",
        "\n\n",
        "\t",
        "'s",
        "I'm",
        "1",
        "23 ",
        "4567",
        ".",
        ", ",
        "(",
        "_",
    ),
    *(
        "\u00e9",
        "e\u0301",
        "\u0301",
        "\u4e2d\u6587",
        "\U0001f600",
        "\u00df",
        "\u200b",
        "\u00a0",
        "<",
        "<|",
        "|>",
        "<|im_",
        " <think> ",
    ),
    *MARKS,
]


def made(regex: str | None = None, **changes: object) -> tokenizers.Tokenizer:
    """A byte-level tokenizer as models have it, with the merges of the demo model."""
    demo = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    if regex is not None:
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        demo.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    demo.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    for name, value in changes.items():
        setattr(demo, name, value)
    return demo


KNOWN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "demo": made,
    "gpt2": lambda: made(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2, written out": lambda: made(GPT2),
    "qwen": lambda: made(QWEN, normalizer=normalizers.NFC()),
    "llama3": lambda: made(LLAMA3),
    "o200k": lambda: made(O200K),
}
WHOLE_ONLY: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "a prefix space": lambda: made(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no words": lambda: made(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "words of two": lambda: made(r"[a-z]+ [a-z]+|\s+|\S+"),
    "a look behind": lambda: made(QWEN + r"|(?<=a )b"),
    "sentencepiece": lambda: made(pre_tokenizer=pre_tokenizers.Metaspace()),
    "a prefix": lambda: made(QWEN, normalizer=normalizers.Prepend("x")),
    "another model": lambda: tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
}

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "\u00e9l\u00e8ve \u4e2d\u6587 \U0001f600 1234 e\u0301 x",
    "a b c\r\n\r\nd",
]
CUT = ("words", "marks", "lines")
LONG = {
    "words": "The quick brown fox, and 1000 more; it's na\u00efve (e\u0301) to say \u4e2d\u6587 so. ",
    "marks": "<|im_start|>user Hello  world<|im_end|>\n<think> a\r\n b </think><|im_",
    "lines": "def f(a, b):\r\n\treturn a if b else c\r\n\r\n",
    "emoji": "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\u0301",
    "marks on letters": "e\u0301a\u0308\u0304 o\u0302",
    "blanks": " \t" * 300 + "x" + "\n" * 200,
    "no blanks": "Donaudampfschifffahrtsgesellschaft0123",
    "one letter": "a",
}
"""What long texts repeat, by what it is."""


def trained(model: Any, trainer: Any, **parts: object) -> tokenizers.Tokenizer:
    """A tokenizer of another sort, of a few words."""
    backend = tokenizers.Tokenizer(model)
    for name, value in parts.items():
        setattr(backend, name, value)
    backend.train_from_iterator(CORPUS * 20, trainer)
    return backend


def trained_pieces() -> tokenizers.Tokenizer:
    """A unigram model behind sentencepiece's marks."""
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return trained(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace(), normalizer=normalizers.NFKC())


TRAINED: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "word pieces": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        normalizer=normalizers.BertNormalizer(),
    ),
    "unigram": trained_pieces,
    "sentencepiece's merges": lambda: trained(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False),
        normalizer=normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
    ),
}
"""Sorts that are never cut."""


def texts(seed: int, count: int) -> list[str]:
    """Return texts of a few hundred characters, of everything that might matter side by side."""
    chance = random.Random(seed)
    return ["".join(chance.choices(ATOMS, k=chance.randrange(1, 200))) for _ in range(count)]


@pytest.mark.parametrize("name", KNOWN)
def test_pieces_have_the_tokens_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random texts, cut wherever it is allowed."""
    backend = KNOWN[name]()
    cut = cuts_of(backend)
    assert cut is not None
    monkeypatch.setattr(cuts, "PIECE", 1)
    num_pieces = 0
    for text in texts(1, 150):
        parts = list(pieces(text, cut))
        num_pieces += len(parts)
        assert "".join(parts) == text
        found = [i for part in parts for i in backend.encode(part, add_special_tokens=False).ids]
        assert found == backend.encode(text, add_special_tokens=False).ids, text
    assert num_pieces > 150 * 5


@pytest.mark.sampled
@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("name", [*KNOWN, *TRAINED])
def test_a_long_text_has_the_tokens_of_the_whole(name: str, kind: str) -> None:
    """Texts of many pieces, of every sort of tokenizer."""
    tokenizer = Tokenizer((KNOWN | TRAINED)[name]())
    size = 1 << 17
    text = (LONG[kind] * (size // len(LONG[kind]) + 1))[:size]
    assert (
        tokenizer.encode(text, add_special_tokens=False)
        == tokenizer._backend.encode(text, add_special_tokens=False).ids
    )


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_others_stay_whole(name: str) -> None:
    """A tokenizer whose words are not split at spaces, or that looks around, is never given a piece."""
    assert cuts_of(WHOLE_ONLY[name]()) is None


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("New York", special=True, normalized=False),
        AddedToken("word", rstrip=True, special=True, normalized=False),
    ],
    ids=lambda token: token.content,
)
def test_added_tokens_over_a_cut_keep_texts_whole(token: AddedToken) -> None:
    """One that holds a cut, or takes the space behind it."""
    backend = made(QWEN)
    backend.add_special_tokens([token])
    assert cuts_of(backend) is None


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<|im_end|><|im_start|>", special=True, normalized=False),
        AddedToken("<strip>", lstrip=True, special=True, normalized=False),
    ],
    ids=lambda token: token.content,
)
def test_marks_that_others_reach_over_are_no_cuts(token: AddedToken) -> None:
    """Words are cut still."""
    backend = made(QWEN)
    backend.add_special_tokens([token])
    cut = cuts_of(backend)
    assert cut is not None
    assert list(pieces("a<|im_start|>" * 4000, cut)) == ["a<|im_start|>" * 4000]


@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_is_the_same_with_what_stands_around_it(special: bool) -> None:
    """What a tokenizer puts in front and behind comes once, and equal ids are one object."""
    backend = made(QWEN)
    ids = [(mark, backend.token_to_id(mark)) for mark in MARKS[:2]]
    backend.post_processor = processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=ids)
    tokenizer, text = Tokenizer(backend), "Some words, and 1000 more: x y z.\n" * 2000
    assert len(text) > WHOLE
    found = tokenizer.encode(text, add_special_tokens=special)
    assert found == backend.encode(text, add_special_tokens=special).ids
    assert len({id(token_id) for token_id in found}) == len(set(found))


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("special", [True, False])
def test_beginnings_are_what_the_whole_begins_with(name: str, special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random texts, ever longer ones, never all, and about how many; with a first token that is configured, too."""
    monkeypatch.setattr("dovetail.text.tokenizer.tokenizer.PIECE", 4)
    monkeypatch.setattr("dovetail.text.tokenizer.tokenizer.WHOLE", 16)
    monkeypatch.setattr(cuts, "PIECE", 4)
    backend = KNOWN[name]()
    bos = {"bos_token": MARKS[0], "add_bos_token": True}
    num_begun = 0
    for config in ({}, bos):
        tokenizer = Tokenizer(backend, TokenizerFiles(tokenizer_config=config))
        for text in texts(2, 30):
            begun: list[list[int]] = []
            abouts: list[int] = []

            def note(ids: list[int], num_about: int) -> None:
                begun.append(ids[:])  # noqa: B023
                abouts.append(num_about)  # noqa: B023

            whole = tokenizer.encode(text, add_special_tokens=special, begun=note)
            assert whole == tokenizer.encode(text, add_special_tokens=special)
            assert all(whole[: len(ids)] == ids for ids in begun)
            assert all(len(after) > len(before) for before, after in pairwise(begun))
            assert all(len(ids) < num <= 4 * len(whole) for ids, num in zip(begun, abouts, strict=True))
            assert not begun or len(begun[-1]) < len(whole)
            num_begun += len(begun)
            assert not special or config is not bos or whole[0] == backend.token_to_id(MARKS[0])
    assert num_begun > 20


class Counting:
    """A tokenizer's library that tells how many texts it was given."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend, self.given = backend, list[str]()

    def encode_batch_fast(self, some: list[str], **options: Any) -> Any:
        """Tokenize, and keep what."""
        self.given += some
        return self._backend.encode_batch_fast(some, **options)


def test_pieces_that_are_known_are_not_tokenized_again() -> None:
    """A conversation that goes on costs what is new; where texts are kept apart, nothing is kept and nothing found."""
    backend = made(QWEN)
    tokenizer = Tokenizer(backend)
    library = tokenizer._backend = Counting(backend)  # type: ignore[assignment]
    whole = " ".join(f"turn {i} says so many words" for i in range(1500))
    for num in (6000, 6001, 9000, 30_000):
        for keeps in (False, True):
            expected = backend.encode(whole[:num], add_special_tokens=False).ids
            library.given.clear()
            assert tokenizer.encode(whole[:num], add_special_tokens=False, keeps=keeps) == expected
            new = sum(len(text) for text in library.given)
            assert new >= num if not keeps or num == 6000 else new <= num - 4 * PIECE
    tokenizer.encode(whole[:20_000], add_special_tokens=False, keeps=True)
    library.given.clear()
    found = tokenizer.encode(whole[:20_000], add_special_tokens=False, keeps=True)
    assert library.given == ["a", "a"]  # what tells what stands around a text
    assert len({id(token_id) for token_id in found}) == len(set(found))


def test_thousands_of_special_tokens_are_looked_at_once() -> None:
    """Each against all others, 2,000 held a start up for 6 s."""
    backend = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(f"<new{i}>", normalized=False) for i in range(4000)])
    began = time.process_time()
    found = cuts_of(backend)
    assert time.process_time() - began < 1
    assert found is not None
    assert "<new3999>" in found.pattern


def test_a_text_that_is_too_long_keeps_nothing() -> None:
    """It would push out those of many others."""
    tokenizer = Tokenizer(made(QWEN))
    text = "word " * (MOST_KEPT // 5 + 1)
    assert len(text) > MOST_KEPT
    tokenizer.encode(text, add_special_tokens=False, keeps=True)
    assert tokenizer._known.find(next(pieces(text, tokenizer._cuts or re.compile("")))) is None
    tokenizer.encode(text[:MOST_KEPT], add_special_tokens=False, keeps=True)
    assert tokenizer._known.find(next(pieces(text, tokenizer._cuts or re.compile("")))) is not None


def test_known_pieces_are_bounded() -> None:
    """Those asked for stay, the others go, and one that could not be cut is not kept."""
    known = KnownPieces(4)
    for num in range(100):
        known.keep(str(num), [num])
        assert known.find("0") is not None
        assert len(known._young) + len(known._old) <= 8
    assert [num for num in range(90) if known.find(str(num)) is not None] == [0]
    assert list(known.find("99") or ()) == [99]
    for num in range(100):
        known.keep(f"many {num}", [1] * KNOWN_IDS)
        assert num < 2 or len(known._young) + len(known._old) <= 2
    known.keep("x" * (2 * PIECE + 1), [1])
    assert known.find("x" * (2 * PIECE + 1)) is None


def test_equal_ids_are_one_object() -> None:
    """Whatever they come from."""
    found = shared(int(text) for text in ["1000", "2000"] * 50)
    assert found == [1000, 2000] * 50
    assert len({id(value) for value in found}) == 2


@pytest.mark.skipif("DOVETAIL_TOKENIZERS" not in os.environ, reason="set it to a folder of models' folders")
def test_tokenizers_of_models_may_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published tokenizers, with random texts."""
    monkeypatch.setattr(cuts, "PIECE", 1)
    for file in sorted(Path(os.environ["DOVETAIL_TOKENIZERS"]).glob("*/tokenizer.json")):
        backend = tokenizers.Tokenizer.from_file(str(file))
        cut = cuts_of(backend)
        assert cut is not None, file
        for text in texts(2, 2000):
            found = [i for part in pieces(text, cut) for i in backend.encode(part, add_special_tokens=False).ids]
            assert found == backend.encode(text, add_special_tokens=False).ids, text
