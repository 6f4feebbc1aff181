"""Log probabilities of a stream are the bytes of those of a whole reply, however they are written."""

from __future__ import annotations

import math

import msgspec
import pytest

from dovetail.contracts.replies import TokenLogprob, TopLogprob
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.apis.chat import logprobs as module
from dovetail_server.apis.chat.logprobs import LogprobBytes, chat_logprobs
from dovetail_server.apis.chat.schema import ChatLogprobs
from dovetail_testing.vocabularies import byte_level

VALUES = (-0.1234567016363144, -1e-7, 0.0, -12345.5, -9999.0, -math.inf, math.nan, None, -3.0, -1e300)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every byte is a token: cut characters, quotes, control characters and the percent sign are among them."""
    return byte_level()


def rows_of(num: int, num_top: int, num_named: int) -> list[TokenLogprob]:
    """Return rows of tokens that follow one another, with every odd number somewhere."""
    numbers = [value for value in VALUES if value is not None]

    def some(at: int, count: int) -> list[TopLogprob]:
        return [TopLogprob((at + 37 * i) % 256, numbers[(at + i) % len(numbers)]) for i in range(count)]

    return [
        TokenLogprob(at % 256, VALUES[at % len(VALUES)], some(at, num_top), some(at + 1, num_named))
        for at in range(num)
    ]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize(("num_top", "num_named", "shown"), [(5, 0, 5), (0, 0, 0), (5, 2, 3), (2, 1, 0)])
def test_bytes_are_those_of_a_whole_reply(
    tokenizer: Tokenizer, as_ids: bool, num_top: int, num_named: int, shown: int
) -> None:
    """Rows alone and together, with and without rivals and named tokens."""
    write = LogprobBytes(tokenizer, as_ids=as_ids)
    rows = rows_of(300, num_top, num_named)
    for some in (rows, *([row] for row in rows)):
        expected = ChatLogprobs(chat_logprobs(some, shown, tokenizer, as_ids=as_ids))
        assert write(some, shown) == msgspec.json.encode(expected)


def test_kept_tokens_are_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than are kept give the same bytes."""
    monkeypatch.setattr(module, "MAX_KEPT", 7)
    write = LogprobBytes(tokenizer, as_ids=False)
    rows = rows_of(40, 5, 0)
    assert write(rows, 5) == msgspec.json.encode(ChatLogprobs(chat_logprobs(rows, 5, tokenizer)))
    assert len(write._kept) <= 7
