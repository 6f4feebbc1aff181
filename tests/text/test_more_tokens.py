"""A tokenizer with more tokens than its model has embeddings."""

from __future__ import annotations

import pytest

from dovetail.contracts.errors import RequestError
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail.processing.pairs import _pair
from dovetail.processing.processor import Processor
from dovetail.processing.reranker import Reranker
from dovetail.processing.sampling import word_ids
from dovetail.processing.text_settings import TextSettings
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_testing.scripted import ScriptedEngine

LAST = "<｜end｜>"


def processor_of(tokenizer: Tokenizer, num_rows: int) -> Processor:
    """Make one for a model with so many embeddings."""
    engine = ScriptedEngine(lambda submit: [0], eos=0, vocab_size=num_rows)
    return Processor(tokenizer, ChatTemplate.load(tokenizer.files)).with_engine_limits(engine.info, TextSettings())


@pytest.fixture
def small(byte_level: Tokenizer) -> Processor:
    return processor_of(byte_level, byte_level.added_tokens[LAST])


def test_text_that_needs_a_token_without_a_row_is_refused(small: Processor) -> None:
    """In a prompt, in what an embedding is made of, and in a pair: 400, before the engine reads beyond the table."""
    small.reranker = Reranker()  # pairs as an encoder reads them
    calls = {
        "prompt": lambda: small.encode(f"a {LAST}", "prompt", add_special_tokens=False),
        "input": lambda: small.encode_text(f"a {LAST}", "input"),
        "documents": lambda: _pair(small, ("a", LAST), ("query", "documents"), None, None),
    }
    for param, call in calls.items():
        with pytest.raises(
            RequestError, match=f"{param} holds '{LAST}'.* the first {small.limits.vocab_size} tok"
        ) as e:
            call()
        assert (e.value.status, e.value.param, e.value.code) == (400, param, "invalid_token_id")
    assert small.encode("the fox", "prompt", add_special_tokens=False)


def test_it_is_told_at_the_start(byte_level: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """With both numbers and some of the tokens; nothing is said where the model has as many, or more."""
    processor_of(byte_level, byte_level.vocab_size)
    processor_of(byte_level, byte_level.vocab_size + 9)
    assert not caplog.records
    rows = byte_level.added_tokens[LAST]
    processor_of(byte_level, rows)
    assert f"has {byte_level.vocab_size:,} tokens and the model embeddings of {rows:,}" in caplog.text
    assert LAST in caplog.text


def test_nothing_that_reaches_the_engine_names_such_a_token(small: Processor) -> None:
    """Not the words that it must not say, nor the ends of a grammar."""
    tokenizer, rows = small.tokenizer, small.limits.vocab_size
    assert word_ids([LAST, "fox"], tokenizer, rows) == word_ids(["fox"], tokenizer, rows)
    assert make_vocabulary(tokenizer, rows, [1, rows, rows + 3]).eos_ids == {1}
