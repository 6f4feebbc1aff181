"""Tokenizers that a text may take long: which those are, and what becomes of their failures."""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from dovetail.contracts.errors import ModelError, RequestError
from dovetail.text.inline import InlineCostError
from dovetail.text.tokenizer import tokenizer
from dovetail.text.tokenizer.bounded import SHORT, growth_of
from dovetail.text.tokenizer.expressions import is_linear
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_backends.gguf.cuts import CUTS

ORDINARY = [
    *sorted({source for sources in CUTS.values() for source in sources}),
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"[\p{Han}]+|[^\r\n\p{L}]?[\p{Lu}&&[^\p{Han}]]*[\p{Ll}&&[^\p{Han}]]+(?i:'s|'t)?|[^\r\n\p{L}]?[\p{Lu}&&[^\p{Han}]]+",
    r" ?[^(\s|[.,!?…])]+",
    " {2,}",
]
OTHERS = [
    r"(a+)+$", r"(a|aa)+$", r"(a|b|ab)*c", r"a*a*b", r".*.*x", r"a+b", r"\s+$", r"\s*x|\s", r"\s*[\r\n]+|\s|\s+",
    r"\s*x| \s+", r"(?:a?){30}a{30}", "a?" * 9 + "a" * 9, r"(\w+)\1", r"x*?y", r"(a{1,20}){1,20}b", r"a{1,5000}b",
    r"(?:a+|b)c", r"(?<=a*)b", r"a**", r"a{2}+b", r"a+(?=b)|a", "(" * 2000, "[a", "a" * 20000,
]  # fmt: skip


@pytest.mark.parametrize("source", ORDINARY)
def test_expressions_of_published_models_are_linear(source: str) -> None:
    """They are run where they were."""
    assert is_linear(source)


@pytest.mark.parametrize("source", OTHERS, ids=lambda source: source[:20])
def test_an_expression_that_may_go_back_is_not(source: str) -> None:
    """Nor is one that is written in another way."""
    assert not is_linear(source)


def split(source: str) -> Callable[[tokenizers.Tokenizer], None]:
    return lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Split(Regex(source), "isolated"))


def normalize(*parts: Any) -> Callable[[tokenizers.Tokenizer], None]:
    return lambda made: setattr(made, "normalizer", normalizers.Sequence(list(parts)))


def model(made: Any) -> Callable[[tokenizers.Tokenizer], None]:
    return lambda backend: setattr(backend, "model", made)


SLOW: dict[str, Callable[[tokenizers.Tokenizer], None]] = {
    "Split by '(a+)+$'": split("(a+)+$"),
    "Replace by '(a+)+$'": normalize(normalizers.Replace(Regex("(a+)+$"), "")),
    "Replace may": normalize(normalizers.Replace("", "a")),
    "Replace by 'a*|b' may": normalize(normalizers.Replace(Regex("a*|b"), "c")),
    "much longer": normalize(normalizers.Replace("a", "a" * 1000)),
    "normalizer Replace makes": normalize(*[normalizers.Replace("a", "aa")] * 30),
    "number 65": normalize(*[normalizers.Lowercase()] * 70),
    "WordPiece": model(models.WordPiece({"a": 0, "[UNK]": 1}, max_input_chars_per_word=10**9)),
    "Unigram": model(models.Unigram([("a" * 1000, 0.0), ("a", 0.0)], 1)),
}


@pytest.mark.parametrize("why", SLOW)
def test_a_tokenizer_that_may_take_long_is_not_run_inline(why: str) -> None:
    """It is seen by its parts, and where others wait it refuses to run."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    assert growth_of(backend) == (sys.maxsize, None)
    SLOW[why](backend)
    made = Tokenizer(backend)
    assert why in str(made.unbounded)
    made.keep_inline()
    for run in (
        lambda: made.encode("a", add_special_tokens=False),
        lambda: made.encode_within("a"),
        lambda: made.beginning("a", 1),
        lambda: made.encode("a" * 9999, add_special_tokens=False),
    ):
        with pytest.raises(InlineCostError, match="process of its own"):
            run()


@pytest.mark.parametrize("source", [r"\s+$", r"\s+$|\p{N}"])
def test_a_tokenizer_that_takes_the_square_of_a_text_is_run_inline_for_short_ones(source: str) -> None:
    """DeepSeek-LLM's expression: a thousand spaces take some milliseconds, and more go elsewhere."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    split(source)(backend)
    made = Tokenizer(backend)
    made.keep_inline()
    began = time.thread_time()
    made.encode(" " * (SHORT - 2) + "a", add_special_tokens=False)
    assert time.thread_time() - began < 0.05
    with pytest.raises(InlineCostError, match="process of its own"):
        made.encode(" " * SHORT, add_special_tokens=False)


def test_a_panic_is_the_tokenizer_s_error() -> None:
    """PyO3's is no `Exception`; the next text is tokenized."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    split("(a+)+$")(backend)
    made = Tokenizer(backend)
    with pytest.raises(RequestError, match=r"tokenizer failed.*not at fault") as found:
        made.encode("a" * 2000 + "b", add_special_tokens=False)
    assert (found.value.status, found.value.code) == (500, "tokenizer_failed")
    assert "\n" not in str(found.value)
    assert made.encode("aab", add_special_tokens=False) == [0, 0, 1]


def test_a_tokenizer_that_panicked_is_not_run_inline_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its parts say: it takes long where Rust prints where it was."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    split("(a+)+$")(backend)
    monkeypatch.setattr(tokenizer, "growth_of", lambda backend: (sys.maxsize, None))
    made = Tokenizer(backend)
    made.keep_inline()
    with pytest.raises(RequestError, match="failed"):
        made.encode("a" * 2000 + "b", add_special_tokens=False)
    with pytest.raises(InlineCostError, match="panicked"):
        made.encode("a", add_special_tokens=False)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 99999},
        {"type": "Replace", "pattern": {"Regex": r"\p{L}"}, "content": ""},
    ],
)
def test_a_decoder_that_may_take_long_is_refused(decoder: dict[str, Any], tmp_path: Path) -> None:
    """Every token of a reply goes through it, in the server's process."""
    tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(state | {"decoder": decoder}))
    with pytest.raises(ModelError, match=r"^[^\n]+$"):
        Tokenizer.load(tmp_path).token_bytes(0)


@pytest.mark.parametrize("table", [b"", b"abc", b"\x08\0\0\0abcd", b"\x04\0\0\0abcd\xff"])
def test_a_table_that_the_library_panics_about_is_told_in_one_line(
    table: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rust prints a panic, so there must be none."""
    tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ModelError, match=r"^[^\n]+$"):
        Tokenizer.load(tmp_path)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("merge", [["a", "b"], "a b", ["a", "é"], ["##b", "##"], ["a", "##b"], ["a", "bbéé"]])
@pytest.mark.parametrize("prefix", ["##", "#é", "", None])
def test_a_merge_that_the_library_panics_about_is_told_in_one_line(
    prefix: str | None, merge: str | list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rust prints a panic, so there must be none: it cuts a prefix off second pieces that do not have it."""
    pieces = ["a", "b", "é", "##", "##b", "bbéé", "ab", "aé", "##b##", "abbéé", "abéé", "aéé"]
    model = {"type": "BPE", "vocab": {piece: at for at, piece in enumerate(pieces)}, "merges": [merge]}
    file = {"version": "1.0", "added_tokens": [], "model": model | {"continuing_subword_prefix": prefix}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with contextlib.suppress(ModelError):
        Tokenizer.load(tmp_path)
    assert not capfd.readouterr().err


TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize("merges", [[["a", "b"]], ["a b"], [["a", "b"], ["ab", "é"]], []])
@pytest.mark.parametrize("longest", ["é", "ab", "abé", 'ab"', "long"])
def test_a_merge_longer_than_every_token_is_told_in_one_line(
    longest: str, merges: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library joins merges in a buffer for the longest token, and panics beyond; others load, or are refused."""
    vocab = {piece: at for at, piece in enumerate(dict.fromkeys(["a", "b", "é", longest]))}
    made = [merge.split() if isinstance(merge, str) else merge for merge in merges]
    is_right = all("".join(merge) in vocab and merge[0] in vocab for merge in made)
    file = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": merges}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with contextlib.nullcontext() if is_right else pytest.raises(ModelError, match=r"^[^\n]+$"):
        Tokenizer.load(tmp_path)
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": ""}]}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "FixedLength", "length": 0}]}},
        {"post_processor": TEMPLATE | {"single": [{"SpecialToken": {"id": "X", "type_id": 0}}, TEXT]}},
        {"post_processor": TEMPLATE | {"single": [{"Sequence": {"id": "B", "type_id": 0}}]}},
        {"post_processor": {"type": "Sequence", "processors": [
            TEMPLATE | {"single": [{"SpecialToken": {"id": "X", "type_id": 0}}, TEXT]}]}},
    ],
)  # fmt: skip
def test_a_step_that_the_library_panics_about_is_told_in_one_line(
    part: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would at the first text: each request would fail."""
    tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(state | part))
    with pytest.raises(ModelError, match=r"^[^\n]+; download it again$"):
        Tokenizer.load(tmp_path)
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {"content": "c"}}},
        {"added_tokens_decoder": {"2": {}}},
        {"added_tokens_decoder": {"2": {"content": 5}}},
        {"added_tokens_decoder": [1]},
        {"additional_special_tokens": 5},
        {"model_input_names": 5},
    ],
)
def test_files_that_do_not_go_together_are_told_in_one_line(config: dict[str, Any], tmp_path: Path) -> None:
    """Values of another kind than they should be."""
    tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"^[^\n]+$"):
        Tokenizer.load(tmp_path)
