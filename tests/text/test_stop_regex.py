"""Regular expressions that end a reply."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.errors import RequestError
from dovetail.sdk.formats.stop_regex import MAX_HELD, RegexStopMatcher, compile_stop, make_stops

PATTERNS = ["ab", "a+b", "b(a|<)", "[ab]<", "<{2}", "a(?=<)"]


def run(pieces: list[str], stop: list[str], expressions: list[str], *, keep: bool = False) -> tuple[str, str | None]:
    """What is left of a text that comes in pieces, and what ended it."""
    stops = make_stops(stop, expressions, keep_match=keep)
    assert stops is not None
    kept = ""
    for piece in pieces:
        would = stops.would_match(piece)
        kept += stops.feed(piece)
        assert would == (stops.matched is not None)
        if stops.matched is not None:
            return kept, stops.matched
    return kept + stops.flush(), None


@given(text=st.text("ab<c", max_size=40), pattern=st.sampled_from(PATTERNS), keep=st.booleans())
def test_the_first_match_ends_a_text_that_comes_by_characters(text: str, pattern: str, keep: bool) -> None:
    """What is kept is the text before the match that is complete first; nothing of the match got out before."""
    want: tuple[str, str | None] = (text, None)
    for end in range(1, len(text) + 1):
        found = re.search(pattern, text[:end])
        if found is not None:
            want = (text[: found.end() if keep else found.start()], found.group())
            break
    assert run(list(text), [], [pattern], keep=keep) == want


def test_the_beginning_of_a_match_is_held_back() -> None:
    """Text that may become a match waits; text that cannot goes out at once."""
    stops = RegexStopMatcher([r"\n\nUser \d+:"])
    assert stops.feed("so it is\n") == "so it is"
    assert stops.feed("and") == "\nand"
    assert stops.feed("\n\nUser 12") == ""
    assert stops.feed(":") == ""
    assert stops.matched == "\n\nUser 12:"


def test_strings_and_expressions_together_end_at_the_first() -> None:
    """Whichever is complete first ends the reply; its text is gone unless it is kept."""
    assert run(["so ", "it 4", "2 END"], ["END"], [r"\d\d"]) == ("so it ", "42")
    assert run(["so ", "END 42"], ["END"], [r"\d\d"]) == ("so ", "END")
    assert run(["so ", "EN", "D 42"], ["END"], [r"\d\d"], keep=True) == ("so END", "END")
    assert run(["so it is E"], ["END"], [r"\d\d"]) == ("so it is E", None)


@pytest.mark.parametrize("source", ["(", "a*", "x?", "[", "(?P<n", "a" * 600, "(?:)"])
def test_what_is_no_stop_expression_is_refused(source: str) -> None:
    """Not an expression, too long, or one that the empty text matches: an error that names the field."""
    with pytest.raises(RequestError) as caught:
        compile_stop(source)
    assert caught.value.param == "stop_regex"


def test_an_expression_that_takes_too_long_ends_its_request() -> None:
    """Catastrophic backtracking is cut off with an error."""
    stops = RegexStopMatcher([r"(?:a|a|aa)+(?:a|aa)+$b"])
    with pytest.raises(RequestError, match="takes longer"):
        stops.feed("a" * 400)


def test_expressions_that_take_long_on_every_token_end_their_request() -> None:
    """Looks that are each short enough may not go on for a whole reply either."""
    with pytest.raises(RequestError, match="takes longer"):
        run(["a"] * 2000, [], [r"(?:a|a)+$b"] * 32)


def test_the_time_of_other_threads_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's clock is the whole process's: a look that ran out while others worked is repeated."""
    looks: list[float] = []

    class Busy:
        pattern = "b"

        def finditer(self, text: str, *, partial: bool, timeout: float) -> Iterator[re.Match[str]]:
            looks.append(timeout)
            if len(looks) < 3:
                raise TimeoutError
            return re.finditer("b", text)

    monkeypatch.setattr("dovetail.sdk.formats.stop_regex.compile_stop", lambda _source: Busy())
    stops = RegexStopMatcher(["b"])
    assert stops.feed("ab") == "a"
    assert stops.matched == "b"
    assert len(looks) == 3


def test_memory_is_bounded() -> None:
    """An expression that could begin anywhere holds back no more than its window."""
    stops = RegexStopMatcher(["(?s).{1,100000}END"])
    given_out = sum(len(stops.feed("x" * 1000)) for _ in range(20))
    assert given_out == 20_000 - MAX_HELD
