"""Lark grammars of custom tools: as expressions, and enforced for a call's text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grammar_server import WithGrammars
from harness import Harness

from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind
from dovetail.grammar.compile.vocabulary import make_vocabulary
from dovetail_grammar.llguidance import LlguidanceBackend
from dovetail_parsers.tools.hermes import HermesTools
from dovetail_server.apis.lark import MAX_CHARS, NotRegularError, expression_of, written_as_expression

EDIT = """
// what an editing tool takes: files that are made, removed or changed line by line
start: opening (made | removed | changed)+ closing
opening: "=== Edit" LF
closing: "=== Done" LF?
made: "=== New: " name LF added+
removed: "=== Gone: " name LF
changed: "=== File: " name LF moved? lines?
name: /(.+)/
added: "+" /(.*)/ LF -> line
moved: "=== To: " name LF
lines: (place | line)+ last?
place: ("@@"
      | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
last: "=== End" LF
%import common.LF
"""
GOOD = [
    '=== Edit\n=== New: a.py\n+x = "1"\n+\n=== Done',
    "=== Edit\n=== File: a\n=== To: b\n@@ def f\n-\\n\n+é\n === Done\n=== End\n=== Gone: c\n=== Done\n",
]
BAD = ["", "=== Edit\n=== Done", "=== Edit\n=== New: a\n=== Done", "=== Edit\n=== New: a\nx\n=== Done", "x"]
CUSTOM = {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "lark", "definition": EDIT}}
SPACED = 'start: N ("," N)*\nN: INT | /[x-z]/\n%import common (INT, WS)\n%ignore WS'
LINES = 'start: [x] "]"\nx.2: /a.b/s\n  | "//" // both\n  | "|"\n\n  | "/"'
RECURSIVE = 'start: "(" start ")" | "x"'


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (EDIT, GOOD, BAD),
        ('start: list\nlist: "a" | list "," "a"', ["a", "a,a,a"], ["", "a,", ",a"]),
        ('start: x\nx: "a" x | "b"', ["b", "aab"], ["a", "ab b"]),
        ('start: A\nA: "a".."c"~2..3 "Or"i', ["abOR", "ccaor"], ["aor", "abcdor"]),
        (SPACED, ["1, 2 ,z", " 7 "], ["1 2", "1,,2"]),
        (LINES, ["]", "a\nb]", "//]", "|]", "/]"], ["a\nb", "ab]"]),
        ('start: /a.b/ | "\\"\\\\\\n"', ["a\rb", '"\\\n'], ["a\nb"]),
        ("?start: w -> x\n!w: CNAME\n%import common.CNAME -> CNAME", ["_a1"], ["1a"]),
    ],
)
def test_expressions(grammar: str, good: list[str], bad: list[str]) -> None:
    """What Lark accepts matches, and what it does not accept does not."""
    found = re.compile(written_as_expression(grammar))
    assert [text for text in good if not found.fullmatch(text)] == []
    assert [text for text in bad if found.fullmatch(text)] == []


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (RECURSIVE, "recursive"),
        ('start: start start | "x"', "recursive"),
        ("start: start", "recursive"),
        ('start: a\na: b\nb: a "x"', "recursive"),
        ("start: a", "no rule a"),
        ("", "no rule start"),
        ("start: /(?=a)b/", "look-around"),
        (r"start: /(a)\1/", "not read here"),
        ("start: /a/i", "flags"),
        ("%import python.NAME\nstart: NAME", "imports"),
        ("%import common.NOTHING\nstart: NOTHING", "not known"),
        ("%declare X\nstart: X", "%declare"),
        ('start: x{"a"}\nx{y}: y', "cannot be read"),
        ('start: "a"~1000', "repeats"),
        ('start: ("a"', "not closed"),
        ('start: "a" )', "cannot be read behind"),
        ('start: "a"\nstart: "b"', "cannot be read"),
        ("start: a\n" + "".join(f"{chr(97 + n)}: {chr(98 + n)} {chr(98 + n)}\n" for n in range(20)) + 'u: "x"', "8000"),
        ("x" * (MAX_CHARS + 1), "characters"),
        ("start: " + "(" * 5000, "deep"),
        ("\n" * 65_000, "no rule start"),
        ("start: /" + "[" * 7000 + "/", "too early"),
        ('"' * 65_000, "cannot be read"),
        ("start: " + "a " * 30_000, "no rule a"),
        ("\n //x" * 13_000, "no rule start"),
        ("".join(f"r{n}: r{n + 1}\n" for n in range(900)) + "start: r0", "deep"),
        ("".join(f"r{n}: " + '"x" ' * 7 + "\n" for n in range(1500)), "rules"),
    ],
)
def test_what_becomes_no_expression(grammar: str, why: str) -> None:
    """Says why, in a second at most, whatever it is."""
    began = time.process_time()
    with pytest.raises(NotRegularError, match=re.escape(why)):
        written_as_expression(grammar)
    assert time.process_time() - began < 1
    assert expression_of(grammar) is None


@pytest.fixture
def enforcing(folder: Path) -> Any:
    server = WithGrammars(folder, context_len=8192)
    yield server
    server.close()


def ask(server: Harness, *tools: Any, **fields: Any) -> dict[str, Any]:
    reply = server.post(
        "/v1/responses", {"model": "tiny", "input": "x", "tools": list(tools), "store": False, **fields}
    )
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def written(text: str) -> str:
    call = json.dumps({"name": "edit", "arguments": {"input": text}}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def test_a_calls_text_is_held_to_the_grammar(enforcing: Harness) -> None:
    """With `tool_choice` auto: the engine's grammar takes free text and good calls, and no other call of the tool."""
    enforcing.text = written(GOOD[0])
    found = ask(enforcing, CUSTOM)
    assert (found["output"][0]["type"], found["output"][0]["input"]) == ("custom_tool_call", GOOD[0])
    assert "dovetail" not in found
    [step, *_] = enforcing.engine.submits[-1].grammar
    tokenizer = enforcing.tokenizer
    vocabulary = make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    backend = LlguidanceBackend(vocabulary)
    made = backend.compile(GrammarSpec(kind=Kind(step.kind), source=step.source), GrammarLimits())
    grammar = backend.load(made) if isinstance(made, bytes) else made

    def accepts(text: str) -> bool:
        ids = enforcing.tokenizer.encode(text, add_special_tokens=False)
        return grammar.matcher().accept([*ids, min(vocabulary.eos_ids)]) == len(ids) + 1

    assert accepts("Just a text.")
    assert [text for text in GOOD if not accepts(written(text))] == []
    assert [text for text in BAD if accepts(written(text))] == []


def test_what_cannot_be_enforced_is_named(enforcing: Harness, make_harness: Callable[..., Harness]) -> None:
    """A recursive grammar, what is too much in a request, and a server without a backend: served, and named."""
    recursive = {**CUSTOM, "name": "deep", "format": {**CUSTOM["format"], "definition": RECURSIVE}}  # type: ignore[dict-item]
    assert ask(enforcing, CUSTOM, recursive)["dovetail"]["unenforced"] == ["tools[1].format"]
    assert ask(enforcing, recursive)["dovetail"]["unenforced"] == ["tools[0].format"]
    assert not enforcing.engine.submits[-1].grammar
    assert "dovetail" not in ask(enforcing, CUSTOM, tool_choice="required")
    namespace = {"type": "namespace", "name": "my", "tools": [recursive, CUSTOM]}
    assert ask(enforcing, namespace)["dovetail"]["unenforced"] == ["tools[0].tools[0].format"]
    without = make_harness(tools=HermesTools(), context_len=8192)
    assert ask(without, CUSTOM)["dovetail"]["unenforced"] == ["tools[0].format"]
    large = {**CUSTOM["format"], "definition": f"{EDIT}//{'x ' * (MAX_CHARS // 2)}"}  # type: ignore[dict-item]
    roomy = make_harness(tools=HermesTools(), context_len=1 << 18)
    found = ask(roomy, CUSTOM, {**CUSTOM, "name": "large", "format": large})
    assert found["dovetail"]["unenforced"] == ["tools[1].format", "tools[0].format"]
