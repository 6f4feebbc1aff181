"""Incremental detokenization."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.sdk.formats.detokenizer import Detokenizer
from dovetail.text.tokenizer.tokenizer import Tokenizer


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


def pieces(tokenizer: Tokenizer, ids: list[int], *, at_start: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, at_start=at_start)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def test_pieces_equal_the_decoded_whole(tokenizer: Tokenizer) -> None:
    """For random ids, out-of-vocabulary and special ones among them, the pieces concatenate to `decode`."""
    rng = random.Random(5)
    for _ in range(3000):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(12))]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_decode_equals_the_library_for_any_byte_level_ids(byte_level: Tokenizer) -> None:
    """Our bytes-based decoding is the tokenizers library's, replacement characters included."""
    rng = random.Random(6)
    for skip in (True, False):
        for _ in range(2000):
            ids = [rng.randrange(byte_level.vocab_size) for _ in range(rng.randrange(12))]
            assert byte_level.decode(ids, skip_special_tokens=skip) == byte_level._backend.decode(ids, skip)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁<"), max_size=30))
def test_decode_equals_the_library_for_byte_fallback_text(byte_fallback: Tokenizer, text: str) -> None:
    """With byte fallback the two agree on every sequence that came from text."""
    ids = byte_fallback.encode(text, add_special_tokens=False)
    assert byte_fallback.decode(ids, skip_special_tokens=True) == byte_fallback._backend.decode(ids) == text


def test_no_broken_character_before_the_end(tokenizer: Tokenizer) -> None:
    """A character cut into bytes comes out whole with its last byte; cut off, it is one U+FFFD at the end."""
    ids = tokenizer.encode("é🎉", add_special_tokens=False)
    for length in range(len(ids) + 1):
        *streamed, rest = pieces(tokenizer, ids[:length])
        assert "\ufffd" not in "".join(streamed)
        assert rest in ("", "\ufffd")
    assert pieces(tokenizer, ids)[-1] == ""


def test_bytes_that_cannot_become_a_character_do_not_wait(byte_fallback: Tokenizer) -> None:
    """A lead byte followed by a letter is U+FFFD and the letter at once."""
    lead, letter = 3 + 0xE4, byte_fallback._backend.token_to_id("a")
    assert pieces(byte_fallback, [lead, letter]) == ["", "\ufffda", ""]


def test_text_that_continues_a_prompt_keeps_its_space(byte_fallback: Tokenizer) -> None:
    """The prefix space of sentencepiece is dropped only where a text begins."""
    ids = byte_fallback.encode("the Paris", add_special_tokens=False)
    assert "".join(pieces(byte_fallback, ids)) == "the Paris"
    assert "".join(pieces(byte_fallback, ids, at_start=False)) == " the Paris"


def test_prompt_and_output_join_to_the_whole(tokenizer: Tokenizer) -> None:
    """Decoding a prompt and detokenizing what follows gives the text of both, wherever the cut is."""
    ids = tokenizer.encode("the élève thinks 中文", add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    for cut in range(1, len(ids)):
        prompt = tokenizer.decode(ids[:cut], skip_special_tokens=True)
        if not prompt.endswith("\ufffd"):
            assert prompt + "".join(pieces(tokenizer, ids[cut:], at_start=False)) == whole


def test_special_tokens_do_not_cut_a_character(byte_level: Tokenizer) -> None:
    """A skipped special token between two bytes of a character changes nothing; a kept one breaks it."""
    first, second = byte_level.encode("\u07ff", add_special_tokens=False)
    end = byte_level.added_tokens["<|im_end|>"]
    assert "".join(pieces(byte_level, [first, end, second])) == "\u07ff"
    shown = Detokenizer(byte_level, skip_special_tokens=False)
    assert shown.feed([first, end, second]) + shown.flush() == "\ufffd<|im_end|>\ufffd"
