r"""What expressions mean: a request's `regex` as Python and Rust read it, a schema's `pattern` as ECMAScript does.

Random expressions of what dialects read differently: where a grammar is enforced in full, it accepts a text exactly if
the reference finds it; where nobody knows what is meant, the request is refused.
"""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Mapping

import pytest
from grammar_routes import Enforced, backends_of

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarBackend, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.compile.validity import as_python
from dovetail.grammar.spec.fields import check_spec
from dovetail.grammar.spec.route import GrammarRouter

ATOMS = (
    *("a", "b", "A", "1", "_", "-", " ", "é", ".", r"\w", r"\d", r"\s", r"\W", r"\D", r"\S", r"\.", r"\-", r"\n"),
    *(
        "[a-c]",
        "[^a]",
        "[a-z&&[^b]]",
        "[a&&b]",
        "[[a]b]",
        "[a-z--b]",
        "[a~~b]",
        r"[\w-]",
        r"[^\w]",
        r"[^\d]",
        r"[\d\s]",
    ),
    *(
        "[-a]",
        "[a-]",
        "[]a]",
        "[^]a]",
        r"[a\]b]",
        r"\b",
        r"\B",
        "^",
        "$",
        r"\A",
        r"\Z",
        r"\x41",
        r"\u0041",
        r"\0",
        r"\h",
    ),
    *("{", "}", "a{,2}", "a{2}", "a{1,}", "(?i:a)", "(?s:.)", "(?x:a b)", "(?=a)", "(?!a)", "(?<=a)", "[[:alpha:]]"),
    *("[:a]", r"\\", r"\"", '"', "[é-ü]", r"[^\S]", r"[\S]", "a++", "a*?", "a??", r"\a", r"\v", r"\z", "[.]", r"[^\n]"),
)
CHARS = 'abcABC1_-é ß١.&[]~"\\/{},20üÉKſ^$znhe:lp\n\t\r\x0b\x0c\u2028\xa0\x85\ufeff\x00ª😀'
"""Without what is a word's to Rust and not to Python, or the other way round, such as `²` and U+001C."""


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Bytes."""
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    ends = frozenset([256])
    return Vocabulary(tokens=tokens, size=257, eos_ids=ends, special_ids=ends, fingerprint="bytes")


@pytest.fixture(scope="module")
def backends(vocabulary: Vocabulary) -> Mapping[str, GrammarBackend]:
    return backends_of(vocabulary)


def expression(rng: random.Random, depth: int = 0) -> str:
    parts = []
    for _ in range(rng.randint(1, 3)):
        part = rng.choice(ATOMS)
        if depth < 2 and rng.random() < 0.2:
            part = f"({expression(rng, depth + 1)})"
        elif depth < 2 and rng.random() < 0.1:
            part = f"(?:{expression(rng, depth + 1)}|{expression(rng, depth + 1)})"
        parts.append(part + (rng.choice("*+?") if rng.random() < 0.25 else ""))
    return "".join(parts)


def texts(rng: random.Random) -> list[str]:
    made = ["".join(rng.choices("ab1A_ -.é", k=rng.randint(1, 5))) for _ in range(30)]
    return [*CHARS, *made, *("".join(rng.choices(CHARS, k=rng.randint(2, 4))) for _ in range(60))]


def enforced(
    spec: GrammarSpec, backends: Mapping[str, GrammarBackend], vocabulary: Vocabulary
) -> Enforced | RequestError:
    try:
        check_spec(spec)
        found = Enforced(GrammarRouter(backends).route(spec, "regex"), backends, vocabulary, full_only=True)
    except RequestError as error:
        return error
    return found if found.enforcement == "full" else RequestError("; ".join(found.errors))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
@pytest.mark.parametrize("names", [("llguidance", "outlines", "xgrammar"), ("xgrammar",)], ids=["auto", "xgrammar"])
def test_a_regex_means_what_python_and_rust_read(
    seed: int, names: tuple[str, ...], backends: Mapping[str, GrammarBackend], vocabulary: Vocabulary
) -> None:
    """No text is accepted that does not match; where the library reads all of Unicode, every one that does is."""
    rng, some, num = random.Random(seed), {name: backends[name] for name in names}, 0
    for _ in range(120):
        given = expression(rng)
        found = enforced(GrammarSpec(kind=Kind.REGEX, source=given), some, vocabulary)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets in sets, which are refused
            try:
                reference = re.compile(given)
            except re.error:
                continue
        if isinstance(found, RequestError):
            continue
        num += 1
        for text in texts(rng):
            wanted, got = reference.fullmatch(text) is not None, found.accepts(text)
            assert wanted or not got, (given, text)
            assert got or not wanted or "llguidance" not in names, (given, text)
    assert num > 20


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_a_pattern_means_what_its_verdict_says(
    seed: int, backends: Mapping[str, GrammarBackend], vocabulary: Vocabulary
) -> None:
    """Under full a string is accepted exactly if the validator finds the pattern in it."""
    rng, num = random.Random(seed), 0
    for _ in range(120):
        given = expression(rng)
        source = json.dumps({"type": "string", "pattern": given})
        found = enforced(GrammarSpec(kind=Kind.JSON, source=source), backends, vocabulary)
        try:
            reference = re.compile(as_python(given))
        except re.error:
            continue
        if isinstance(found, RequestError):
            continue
        num += 1
        for text in texts(rng):
            if min(text) >= " ":
                got = found.accepts(json.dumps(text, ensure_ascii=False))
                assert (reference.search(text) is not None) == got, (given, text)
    assert num > 20


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("[a-z&&[^b]]", "'&&' within a class at character 5"),
        ("x[[a]b]", "'[' within a class at character 3"),
        ("[[:alpha:]]+", "'[' within a class at character 2"),
        ("[a-z--b]", "'--' within a class"),
        (r"\[[a~~b]", "'~~' within a class at character 5"),
    ],
)
def test_what_has_two_meanings_is_refused(given: str, what: str) -> None:
    """In one line that says what and where, in a structural tag, too."""
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": given}}
    for spec in (
        GrammarSpec(kind=Kind.REGEX, source=given),
        GrammarSpec(kind=Kind.STRUCTURAL, source=json.dumps(tag)),
    ):
        with pytest.raises(RequestError) as error:
            check_spec(spec, "regex")
        assert what in error.value.message
        assert "\n" not in error.value.message


@pytest.mark.parametrize("given", [r"[\[a]", r"a&&b", r"\[[a]\]", "[a-z]--", r"[a\-\-b]", "[&a]"])
def test_what_has_one_meaning_is_not(given: str) -> None:
    """Escapes, and the same characters outside of a class."""
    check_spec(GrammarSpec(kind=Kind.REGEX, source=given), "regex")


@pytest.mark.parametrize(
    ("given", "texts_of", "others"),
    [
        (r"\w+", ["é", "ß1_", "ªK"], ["-", " "]),
        (r"\b\w+\b", ["café", "x"], ["\xe9x ", "-"]),
        (r"(?!foo)\w+ \d{3}", ["éa 123", "fo 000"], ["foo 123", "foo1 123"]),
        (r"\s(?!a)", ["\u2003", "\x85"], ["\ufeff", "a"]),
        ("[]a](?!b).", ["]x", "a]"], ["ab", "x"]),
        ("(^a|b$)c?", ["a", "ac", "b"], ["c", "bc", ""]),
        ("^(a|$)b?", ["a", "ab", ""], ["b"]),
        ("x*(^a)", ["a"], ["xa"]),
        ("(a$)?b|^c$", ["b", "c"], ["ab", "a"]),
    ],
)
def test_words_and_spaces_are_unicodes(
    given: str,
    texts_of: list[str],
    others: list[str],
    backends: Mapping[str, GrammarBackend],
    vocabulary: Vocabulary,
) -> None:
    """With look-around and edges of words as without."""
    found = enforced(GrammarSpec(kind=Kind.REGEX, source=given), backends, vocabulary)
    assert isinstance(found, Enforced)
    assert [found.accepts(text) for text in texts_of] == [True] * len(texts_of)
    assert [found.accepts(text) for text in others] == [False] * len(others)
