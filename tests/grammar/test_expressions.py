r"""Expressions as sets of texts, against Python's and ECMAScript's: plainly, what does not match, what is apart."""

from __future__ import annotations

import itertools
import os
import random
import re
import time

import jsonschema_rs
import pytest

from dovetail.sdk.expressions.reading import UnreadableError, read
from dovetail_grammar.expressions import complement, plainly

GIVEN = [
    "a(?!b)c", "^a(?=b)", "^(?!a)b|c$", "^(?!a+)b", "(?!a)b", r"^(?!\d)a", "^(?=a$|b)c", "^(?:(?!ab).)*$", r"\bab\b",
    r"^(?:a(?!b)|b(?=a))+$", r"\ba|b\B", r"^(?!.*\bab\b).*$", "(?<=a)b", "(?<!a)b$", r"^.*(?<!ab)$", "^a|b$|(?=cc)",
    r"^(?=.*\d)(?=.*[a-c])\w{2,4}$", "(?!^[ab]+$)([abc ]+)", r"^((\.(?!\.)-)?\w+-?)+$", "^[abc](?:[abc -](?!--))*b?$",
    r"^(?!-)(?!.{0,4}--)[ab-]{1,4}(?<!-)$", r"(?<=^a| )b", r"^$|^a+$", r"^(a(b$)?|c)", r"\B-\B", r"^(?:a|(?!b)){2}c",
    r"^\s*(?=\S)", r"^(?<x>a)(?:b(?!c))?.{1,2}$", "^(?!(?!a)b).", r"(?=(?=a).b)..c?$", r"^[^a]*(?:a(?![bc ])[^a]*)*$",
    "a{0}b|^c{2,3}$", r"^(?=a*$)a{2,}", r"[\s\S]^a", "a$b", "^(?:^a)?b$", r"-(?=\b)|\b$",
]  # fmt: skip
PIECES = ["a", "b", "c", "-", "--", " ", ".", "1", "\n", "ab", "_"]


def meant(pattern: str) -> re.Pattern[str]:
    r"""As Python reads it where it differs: `$` is the end only, `.` no end of a line, names of groups."""
    return re.compile(re.sub(r"(?<!\\)\$", r"\\Z", pattern).replace("(?<x>", "(?:"), re.ASCII)


def texts(seed: int, count: int = 1500) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(PIECES, k=rng.randint(0, 7))) for _ in range(count)]


@pytest.mark.parametrize("pattern", [pattern for pattern in GIVEN if pattern != "(?<=^a| )b"])
@pytest.mark.parametrize("in_one", [False, True])
def test_plain_words_match_the_same_texts(pattern: str, in_one: bool) -> None:
    """With look-around before, behind, within, repeated and in itself; edges of words; anchors anywhere."""
    made = plainly(pattern, in_one=in_one).parts
    assert made is not None
    assert len(made) == 1 or not in_one
    whole, parts = meant(pattern), [re.compile(re.sub(r"\$$", r"\\Z", part)) for part in made]
    for part in made:
        assert re.search(r"\(\?[=!<]|\\[bB]", part) is None
        assert not re.search(r"[$^]", re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", part)[1:-1])
    for text in texts(1):
        assert (whole.search(text) is not None) == all(part.search(text) for part in parts), (text, made)


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        (r"^(?!a)[\p{L}-]*$", (r"^[\p{L}-]*$", "^(?:(?:[^a][\\s\\S]*)?)$")),
        (r"^(?=[)a](?:b))\p{L}", (r"^\p{L}", "^[)a]b")),
        (r"^(?!a)\p{L}|b", None), (r"^(?!\p{L})b", None), (r"^(?!a)\p{L}(?!b)", None),
        (r"(?!a)\p{L}", None), (r"^\p{L}", None),
    ],
)  # fmt: skip
def test_what_is_not_read_stays_as_it_is_behind_what_is_looked_for(pattern: str, parts: object) -> None:
    """Libraries know characters by their properties; look-ahead in front of them is read on its own."""
    assert plainly(pattern).parts == parts
    assert plainly(pattern, in_one=True).parts is None


@pytest.mark.parametrize("pattern", GIVEN)
def test_the_complement_matches_all_others(pattern: str) -> None:
    """By ECMAScript's reading, as a validator of schemas has it."""
    other, _ = complement(pattern)
    assert other is not None
    judge = jsonschema_rs.validator_for({"pattern": pattern})
    found = re.compile(re.sub(r"\$$", r"\\Z", other))
    for text in texts(2):
        assert judge.is_valid(text) != bool(found.search(text)), (text, other)


SHORT = ["".join(text) for length in range(6) for text in itertools.product("ab-", repeat=length)]


class Anyone:
    """Writes expressions as they come: look-around in look-around, repeated, empty, contradictory."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def choice(self, depth: int = 2) -> str:
        return "|".join(self.row(depth) for _ in range(self.rng.choice([1, 1, 1, 2])))

    def row(self, depth: int) -> str:
        return "".join(self.part(depth) for _ in range(self.rng.randint(1, 4)))

    def part(self, depth: int) -> str:
        rng, kind = self.rng, self.rng.random()
        times = rng.choice(["", "", "*", "+", "?", "{2}", "{1,3}"])
        if kind < 0.6 or not depth:
            return rng.choice(["a", "b", "-", "[ab]", "[^a]", r"\w", r"\W", "."]) + times
        if kind < 0.7:
            return rng.choice([r"\b", r"\B", "^", "$"])
        opening = rng.choice(["(?:", "(?=", "(?!", "(?<=", "(?<!"])
        return f"{opening}{self.choice(depth - 1)}){times if opening == '(?:' else ''}"


@pytest.mark.parametrize("seed", range(int(os.environ.get("DOVETAIL_SEEDS", "4"))))
def test_what_is_said_plainly_of_any_expression_is_right(seed: int) -> None:
    r"""Or nothing is said: all texts of up to five characters (Python before 3.14 finds no `\B` in the empty one)."""
    anyone, said = Anyone(seed), 0
    for _ in range(150):
        pattern = "^" * anyone.rng.randint(0, 1) + anyone.choice() + "$" * anyone.rng.randint(0, 1)
        try:
            whole = meant(pattern.replace(r"\B", r"(?!\b)"))
        except re.error:
            continue  # Python looks behind by one length only
        found = [whole.search(text) is not None for text in SHORT]
        other, _ = complement(pattern)
        for parts, is_not in ((plainly(pattern).parts, False), (other and (other,), True)):
            if parts is not None:
                said += 1
                each = [re.compile(re.sub(r"\$$", r"\\Z", part)) for part in parts]
                match = [all(part.search(text) for part in each) != is_not for text in SHORT]
                assert match == found, (pattern, parts)
    assert said > 100


@pytest.mark.parametrize("pattern", [r"^a*(?<=.a$)", r"(?<=(?=-b[ab])).[^a]", r"^b(?<!-?b(?!-))", r"(?<=a\b)."])
def test_a_look_behind_that_asks_what_follows_is_not_said_plainly(pattern: str) -> None:
    """What stands behind it is not what it ends with."""
    assert plainly(pattern).parts is None
    assert complement(pattern)[0] is None


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "a)",
        "a**",
        "[b-a]",
        r"\1",
        r"\p{L}",
        "(?i)a",
        "a{3,2}",
        "^*",
        r"\u12",
        "(?<1>a)",
        "\\",
        "[a",
        r"\ud800",
        "(?",
    ],
)
def test_what_is_no_expression_is_refused(pattern: str) -> None:
    """Or is none that means a set of texts here."""
    with pytest.raises(UnreadableError):
        read(pattern)
    assert plainly(pattern).parts is None
    assert complement(pattern)[0] is None


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?!.*(?:a.{14}|b.{15}c)).*$",
        r"^(?:(?!a{1,200}b)[ab]{1,300})+$",
        "(?!" * 60 + "a" + ")" * 60,
        "(?=" * 35 + ")" * 35,
        "^" + "(?=.*a.{9}b)" * 100 + "$",
        "(" * 5000,
        "^" + "(?:a?(?!b)){8}" * 12 + "c",
        r"^(?!" + "|".join("abcdefgh" * 90) + ")",
        r"\b(?:\b(?:\b(?:\b(?:\ba|b\b)*\b|c)*\b)*)*",
        "(?=a{1,2000}){9}",
        "(?:(?=a)|(?=b)|(?=c)){8}" * 20,
    ],
)
def test_hostile_expressions_cost_little(pattern: str) -> None:
    """Whoever writes schemas writes these; each is refused or done soon."""
    began = time.thread_time()
    plainly(pattern)
    complement(pattern)
    assert time.thread_time() - began < 4


def test_what_nobody_writes_is_left_out_where_it_would_leak() -> None:
    """Rare control characters, of classes that lack a quote or a backslash; all are there where all are asked for."""
    for control in "\x00\x0b\x1f":
        (tight,) = plainly('^[^"a](?!b)$').parts or ()
        assert re.search(tight, control) is None
        (exact,) = plainly('^[^"a](?!b)$', without=()).parts or ()
        assert re.search(exact, control) is not None
