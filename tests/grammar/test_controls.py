"""Patterns that ask for characters which JSON writes as numbers, beside names that such escapes could spell."""

from __future__ import annotations

import json

import pytest
from grammar_routes import Enforced, backends_of

from dovetail.contracts.grammar import GrammarSpec, Kind
from dovetail.grammar.compile.validity import conforms
from dovetail.grammar.spec.route import GrammarRouter
from dovetail_testing.conformance.grammar_samples import small_vocabulary

PATTERNS = [r"^a\x02$", r"^a\x7F$", r"^a[\x7f]$", r"^a\v$", r"^a\f$", r"^a\x08$", r"^a\cA$", r"^a(\x01|c)?$"]
OTHERS = [r"^a[^\x00-\x1f]$", r"^a\\x01$", r"^a\x09$", r"^a\x41$", r"^a.$"]
"""Patterns that ask for none, or for one with an escape of its own: their classes hold more than such characters."""
VALUES = ["a", "ac", "ab", "aA", "a\t", "a\\x01", *(f"a{chr(code)}" for code in (*range(1, 9), 11, 12, 31, 127))]


@pytest.mark.parametrize("beside", [{}, {"patternProperties": {"^z": {}}}, {"additionalProperties": False}])
def test_what_is_full_accepts_nothing_without_its_control_character(beside: dict[str, object]) -> None:
    """It was left out of the text, silently."""
    vocabulary = small_vocabulary()
    backends = backends_of(vocabulary)
    for pattern in (*PATTERNS, *OTHERS):
        properties = {"x": {"type": "string", "pattern": pattern}}
        schema = {"type": "object", "properties": properties, "required": ["x"], **beside}
        spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(schema))
        found = Enforced(GrammarRouter(backends).route(spec, "json_schema"), backends, vocabulary)
        if found.enforcement != "full":
            assert pattern in PATTERNS
            assert found.ignored == ("/properties/x/pattern",)
            continue
        accepted = {text for value in VALUES if found.accepts(text := json.dumps({"x": value}, ensure_ascii=False))}
        accepted |= {text for value in VALUES if found.accepts(text := json.dumps({"x": value}))}
        assert all(conforms(schema, text) for text in accepted), (pattern, accepted)
        assert accepted


@pytest.mark.parametrize(
    ("regex", "text", "other"),
    [
        (r"\Aab\Z", "ab", "AabZ"), (r"ab\z", "ab", "abz"), (r"a\\Z", "a\\Z", "a\\"), (r"^\Aa$", "a", "Aa"),
        (r"x\hy", None, "xhy"), (r"x\Ky", None, "xKy"), (r"a|\Gb", None, "Gb"), (r"(a\Z|b)c", None, "aZc"),
    ],
)  # fmt: skip
def test_an_escaped_letter_is_never_just_the_letter(regex: str, text: str | None, other: str) -> None:
    r"""`\A` and `\Z` around an expression are its ends; one that nobody knows is refused."""
    vocabulary = small_vocabulary()
    backends = backends_of(vocabulary)
    route = GrammarRouter(backends).route(GrammarSpec(kind=Kind.REGEX, source=regex), "regex")
    found = Enforced(route, backends, vocabulary)
    assert (found.enforcement == "full") == (text is not None)
    if text is not None:
        assert found.accepts(text)
        assert not found.accepts(other)


@pytest.mark.parametrize("regex", ["a++a", "a*+", "a?+b", "a{2}+", "a{1,2}{3}", "(x|y)**", "a+?+"])
def test_a_repetition_of_a_repetition_is_refused(regex: str) -> None:
    """It means one thing to Python, another to the library, none to ECMAScript: `a++a` was `(?:a+)+a`, in full."""
    vocabulary = small_vocabulary()
    backends = backends_of(vocabulary)
    found = Enforced(
        GrammarRouter(backends).route(GrammarSpec(kind=Kind.REGEX, source=regex), "regex"), backends, vocabulary
    )
    assert found.enforcement == "refused"
    assert "(?:a+)+" in found.errors[0]
    schema = {"type": "string", "pattern": f"^{regex}$"}
    spec = GrammarSpec(kind=Kind.JSON, source=json.dumps(schema))
    assert Enforced(GrammarRouter(backends).route(spec, "json_schema"), backends, vocabulary).ignored == ("/pattern",)


@pytest.mark.parametrize("regex", [r"a\++", r"[*+]+", r"a+?b", r"a{2}?", r"(?:a+)+", r"a\{2}+", r"\*\++"])
def test_one_repetition_is_none_of_another(regex: str) -> None:
    """Signs that are escaped or in a class, lazy ones, and groups."""
    vocabulary = small_vocabulary()
    backends = backends_of(vocabulary)
    route = GrammarRouter(backends).route(GrammarSpec(kind=Kind.REGEX, source=regex), "regex")
    assert Enforced(route, backends, vocabulary).enforcement == "full"
