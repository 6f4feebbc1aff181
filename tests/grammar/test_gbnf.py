"""EBNF means characters, not greedy words; llama.cpp's and xgrammar's spellings of it are read."""

from __future__ import annotations

import random
import re

import pytest

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarLimits, GrammarSpec, Kind
from dovetail.plugins import Registry, load, make_plan
from dovetail_testing.conformance.grammar_samples import small_vocabulary

VOCABULARY = small_vocabulary()


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    plan = make_plan(Registry.scan(), grammar_backend="llguidance")
    made: GrammarBackend = load(plan, "compiler").get("grammar_backend", "llguidance")(VOCABULARY)
    return made


def compiled(backend: GrammarBackend, source: str) -> CompiledGrammar:
    result = backend.compile(GrammarSpec(kind=Kind.EBNF, source=source), GrammarLimits())
    return backend.load(result) if isinstance(result, bytes) else result


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    matcher, ids = grammar.matcher(), list(text.encode())
    return matcher.accept(ids) == len(ids) and matcher.accepting


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
CASES = [
    ('root ::= ("if" | [a-z]+) " then"', ["iff then", "if then", "x then"], [" then", "if", "if  then"]),
    ('root ::= [a-z]* "end"', ["end", "endend", "xend", "eend"], ["", "en", "endx"]),
    ('root ::= a* "end"\na ::= [a-z] | "(" a ")"', ["end", "endend", "(x)end", "((e))nend"], ["(end", "en"]),
    ('root ::= [^\\n]+ "\\n" [^\\n]+', ["a\nb", "é\n日"], ["a\n", "a\nb\n"]),
    (
        'root ::= "a" b c?\nb ::= "x"{2}\nc ::= "y"{1,} | "z"{0,2}',
        ["axx", "axxyyy", "axxzz"], ["ax", "axxzzz"],
    ),
    ('root ::= "\\x41\\u00e9\\U0001F600" [\\]\\[-]', ["Aé😀]", "Aé😀-"], ["Aé😀", "A"]),
    ('root ::= . "b" .', ["abc", "\nb\n"], ["ab", "abcd"]),
    ('root ::= ""', [""], ["a"]),
    ('root ::= "/" [/\\\\]* "$^"', ["/$^", "//\\$^"], ["/"]),
    ("root ::= r-1 r_2 r.3\nr-1 ::= [a-]\nr_2 ::= [^a]\nr.3 ::= [0-9a-f]", ["-bf", "ab0"], ["bb0", "aaf"]),
    (JSON, ['{"a": [1, {"b": null}], "cé": "x\\n\\u00e9"}', '{"": -0.5e+2}', "{}"], ["{", '{"a"}', '{"a": 01}', "[1]"]),
    (
        'root ::= "ab"{0,2001} x{2001,100000}\nx ::= "(" x ")" | "c"',
        ["ab" * 2001 + "c" * 2001], ["ab" * 2002, "c" * 2000],
    ),
    ('root ::= [ab]{2001}', ["ab" * 1000 + "a"], ["ab" * 1000, "ab" * 1001]),
    ('root ::= root "a" | "b"', ["b", "baa"], ["a", "ab"]),
    ('root ::= "(" root ")" | ""', ["", "(())"], ["(", "())"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "right", "wrong"), CASES, ids=lambda value: str(value)[:40])
def test_grammars_mean_their_characters(
    backend: GrammarBackend, source: str, right: list[str], wrong: list[str]
) -> None:
    """Whole texts are accepted or not as the grammar says."""
    grammar = compiled(backend, source)
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text


def test_random_grammars_agree_with_a_regular_expression(backend: GrammarBackend) -> None:
    """Words that overlap in every way, written with and without recursion."""
    rng = random.Random(4)
    num_accepted = 0
    for _ in range(60):
        words = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 3))) for _ in range(3)]
        first, second, third = words
        expression = f"(?:{first}|[ab]{{1,2}})*(?:{second})?{third}"
        plain = f'root ::= ("{first}" | [ab]{{1,2}})* "{second}"? "{third}"'
        looped = f'root ::= many "{second}"? "{third}"\nmany ::= "" | many ("{first}" | [ab]{{1,2}})'
        grammars = [compiled(backend, plain), compiled(backend, looped)]
        for _ in range(12):
            text = "".join(rng.choice("abb") for _ in range(rng.randint(0, 6)))
            expected = re.fullmatch(expression, text) is not None
            assert [accepts(grammar, text) for grammar in grammars] == [expected] * 2, (plain, text)
            num_accepted += expected
    assert num_accepted > 100


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("root ::= (", ["expected", "line 1"]),
        ('root ::= "a"\nx ::= missing', ["'missing' is not defined"]),
        ('other ::= "a"', ["no rule `root`"]),
        ('root ::= "a"\nroot ::= "b"', ["defined twice"]),
        ("root ::= [z-a]", ["z-a"]),
        ('root ::= "a"{9999999999}', ["9999999999"]),
        (r"root ::= [\d]+", [r"\d stands for no character", "[0-9]"]),
        (r'root ::= "\x4"', [r"\x stands for no character"]),
        (r'root ::= "\U00110000"', [r"\U00110000 stands for no character"]),
        (r'root ::= "\ud83d\ude00"', [r"\ud83d stands for no character"]),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, ["deep"]),
    ],
)
def test_a_wrong_grammar_is_told_where(backend: GrammarBackend, source: str, words: list[str]) -> None:
    """The message names the rule or the line."""
    with pytest.raises(RequestError) as info:
        compiled(backend, source)
    assert info.value.code == "invalid_grammar"
    assert all(word in info.value.message for word in words), info.value.message


@pytest.mark.parametrize(
    "source", ["root ::= <[12]>", 'root ::= "a" (= "b")', 'root ::= TagDispatch(("a", b))\nb ::= "c"']
)
def test_what_is_not_read_is_left_to_others(backend: GrammarBackend, source: str) -> None:
    """Tokens, lookahead and functions are not taken for something else."""
    with pytest.raises(RequestError) as info:
        compiled(backend, source)
    assert info.value.code == "unsupported_grammar"
