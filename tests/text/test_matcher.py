"""Strings in text that arrives in pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dovetail.sdk.formats.matcher import Matcher, StopMatcher, matcher

words = st.text("ab<", min_size=1, max_size=5)
stops = st.lists(words, min_size=1, max_size=4)
texts = st.text("ab<", max_size=40)


def cut_at_first(text: str, patterns: list[str], keep: bool) -> tuple[str, str | None]:
    """Brute force: the match that ends first, the longest of several that end there."""
    for end in range(1, len(text) + 1):
        if found := [word for word in patterns if text[:end].endswith(word)]:
            longest = max(found, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


@given(patterns=stops, text=texts, cuts=st.lists(st.integers(0, 40), max_size=8), keep=st.booleans())
def test_stop_strings_equal_brute_force_in_any_chunking(
    patterns: list[str], text: str, cuts: list[int], keep: bool
) -> None:
    """The kept text and the matched string are brute force's, however the text is cut."""
    stop = StopMatcher(patterns, keep_match=keep)
    kept = ""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in pairwise(edges):
        assert stop.would_match(text[begin:end]) == (cut_at_first(text[:end], patterns, keep)[1] is not None)
        kept += stop.feed(text[begin:end])
        if stop.matched is not None:
            break
    kept += stop.flush()
    assert (kept, stop.matched) == cut_at_first(text, patterns, keep)


@given(patterns=stops, text=texts)
def test_exactly_the_longest_possible_beginning_is_held(patterns: list[str], text: str) -> None:
    """What is held back is the longest end of the text that begins a pattern, and not a character more."""
    automaton = Matcher(patterns)
    end, state, length = automaton.scan(text, 0, 0)
    if length:
        return
    assert end == len(text)
    begins = [
        size for size in range(len(text) + 1) if any(word[:size] == text[len(text) - size :] for word in patterns)
    ]
    assert automaton.held(state) == max(size for size in begins if size <= max(map(len, patterns)))


def test_a_matcher_without_patterns_finds_nothing() -> None:
    """The empty set is allowed."""
    assert Matcher([]).scan("abc", 0, 0) == (3, 0, 0)


def test_recurring_sets_are_compiled_once() -> None:
    """The automaton of a set is shared."""
    assert matcher(("a", "b")) is matcher(("a", "b"))
