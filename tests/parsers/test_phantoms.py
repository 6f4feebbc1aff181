"""Replies that name a format's tags make no call, and lose nothing of their thinking."""

from __future__ import annotations

import functools
import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from phantoms import formats as all_formats
from phantoms import parsed, phantoms
from samples import CALLS, CONTENT_FIRST, M3, MACHINES

from dovetail.sdk.formats.place import Place
from dovetail.text.tokenizer.tokenizer import Tokenizer

formats = functools.cache(all_formats)
NAMED = [
    # Prose, with a name that is no tool's and with one that is.
    ("qwen3-coder", "A call begins with <function=NAME> and ends with </function>."),
    ("qwen3-coder", "Maybe <function=now> fits."),
    ("qwen3-coder", "So:\n<function=NAME>\n</function>"),
    ("qwen3-coder", "So:\n<function=now>\nis how it begins."),
    ("minimax-m2", 'The tag <invoke name="x"> opens one.\n\nIt is closed by </invoke>.'),
    ("minicpm5", 'So:\n\n    <function name="now"></function>'),
    ("deepseek-v32", 'Behind `<｜DSML｜invoke name="now">` stands\n```\n</｜DSML｜invoke>\n```'),
    ("kimi-k2", "So <|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|> it is."),
    # What is said of a section's marker is no tool's name.
    ("glm45", "Maybe <tool_call> fits."),
    ("iquest-q1", "Maybe <iquest_tool_call> fits."),
    ("minimax-m3", f'Never write ({M3}<tool_call>{M3}<invoke name="NAME">{M3}</city>)!'),
    ("minimax-m2", 'Never write (<minimax:tool_call><invoke name="NAME"></parameter>)!'),
    # Sections, in code and quoted.
    ("hermes", "Write `<tool_call>` first.\n\n```xml\n<tool_call>\n{\"name\": \"now\"}\n</tool_call>\n```\nSo."),
    ("hermes", 'It writes "<tool_call>{"name": "now"}</tool_call>".'),
    ("glm45", "It is ``<tool_call>now</tool_call>``."),
    ("minimax-m3", f'It ends with {M3}<tool_call>.\n\n```\n{CALLS["minimax-m3"]}\n```'),
    ("minimax-m3", f'Then {M3}<tool_call> opens, and {M3}<invoke name="...">{M3}<days>x{M3}</days> comes.'),
    # Code that is indented, in a quote or a list, behind words, and in HTML.
    ("hermes", 'So:\n\n    3\n    <tool_call>\n    {"name": "now"}\n    </tool_call>\n\n\t<tool_call>'),
    ("hermes", '> So:\n> ```xml\n> <tool_call>\n> {"name": "now"}\n> </tool_call>\n> ```'),
    ("hermes", '1. ```xml\n   <tool_call>\n   {"name": "now"}\n   </tool_call>\n   ```'),
    ("hermes", 'So: ```xml\n<tool_call>\n{"name": "now"}\n</tool_call>\n```'),
    ("hermes", '<pre class="x">\n\n<tool_call>\n{"name": "now"}\n</tool_call>\n</pre>So.'),
    ("hermes", '<code>\n<tool_call>\n{"name": "now"}\n</tool_call></code> or <kbd><tool_call></kbd>.'),
    # Quotation marks of other languages.
    *(
        ("hermes", f'So {one}<tool_call>{{"name": "now"}}</tool_call>{two}.')
        for one, two in ("»«", "‹›", "‚‘", "「」", "””", '„"')
    ),
    ("hermes", '用“<tool_call>”和"<tool_call>"。'),
    # What holds the tag of a call holds it to its end, over lines, as does a quote of lines.
    ("qwen3-coder", "So `<tool_call>\n<function=now>\n</function>\n</tool_call>` it is."),
    ("qwen3-coder", "| **``<tool_call>\n<function=now>\n</function>\n</tool_call>``** |"),
    ("minimax-m2", 'So “<minimax:tool_call>\n<invoke name="now">\n</invoke>” it is.'),
    ("seed-oss", 'So "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>" it is.'),
    ("glm45", "> <tool_call>now</tool_call>\n> is one"),
    ("kimi-k3", f"- a\n  > {CALLS['kimi-k3']}\n\nSo."),
    ("hermes", f"So <code>{CALLS['hermes']}</code> it is."),
    # HTML's other elements for code, in capitals, too.
    *(("hermes", f"So:\n<{tag}>\n\n{CALLS['hermes']}\n</{tag}>\nSo.") for tag in ("PRE", "xmp", "textarea", "script")),
    *(("hermes", f"So <{tag}><tool_call>\n{{}}\n</tool_call></{tag}>.") for tag in ("Code", "tt", "VAR")),
    # Lines that end as in Windows.
    ("hermes", 'So:\r\n\r\n    <tool_call>\r\n    {"name": "now"}\r\n    </tool_call>\r\nSo.'),
    # Quotation marks behind others than blanks, and rarer ones.
    *(
        ("glm45", f"So{one}<tool_call>now</tool_call>{two}.")
        for one, two in (
            (':"', '"'), (',"', '"'), ('="', '"'), ("='", "'"), (" _\"", '"_'), ("said“", "”"), ("dit:«", "»"),
            ("《", "》"), ("｢", "｣"), ("，＂", "＂"), (" بـ”", "”"), (" و»x ", "«"), (' ב"', '"'),
        )
    ),
    # HTML's comments, blocks between three quotation marks, and what LaTeX prints as it stands.
    *(
        ("hermes", f"{begin}{CALLS['hermes']}{end}\nSo.")
        for begin, end in (
            ("<!-- a\n\n", "\n-->"), ("So <!--", "-->"), ("So <!--\n\n", "-->"), ('"""A call.\n\n', '\n"""'),
            ('x = """\n\n', '"""'), ("'''\n\n", "\n'''"), ("\\begin{verbatim}\n\n", "\n\\end{verbatim}"),
            ("  \\begin{lstlisting}[a=b]\n", "\\end{lstlisting}"), ("So \\begin{alltt}\n\n", "\\end{alltt}"),
            ("x = f'''", "'''"), ('x = r"""', '"""'), ('s"""\n\n', '\n"""'),
            ("So \\verb|", "|"), ("So \\verb*!", "!"), ("~~~ xml\n", "\n~~~"),
        )
    ),
    # Code at the very beginning, and behind backticks or a mark that end their line.
    *(
        ("hermes", f'{blanks}<tool_call>\n{blanks}{{"name": "now"}}\n{blanks}</tool_call>{end}')
        for blanks in ("    ", "\t", "        ") for end in ("", "\nis how it goes.")
    ),
    ("hermes", '    So:\n    <tool_call>\n    {"name": "now"}\n    </tool_call>'),
    ("qwen3-coder", "\t<function=now>\n\t</function>\nSo."),
    ("llama3", '    {"name": "now", "parameters": {}}\n\nSo.'),
    ("pythonic", "    [now()]\n\nSo."),
    *(
        ("hermes", f'So {mark}\n{CALLS["hermes"]}\n{end}.')
        for mark, end in (("`", "`"), ("``", "``"), ("“", "”"), ("«", "»"))
    ),
    ("seed-oss", 'So "\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>\n".'),
    # An ellipsis is no name.
    ("glm45", "It is <tool_call>...</tool_call>."),
    ("iquest-q1", "<iquest_tool_call>...</iquest_tool_call> holds it."),
    # What stands where a call's name does opens code.
    (
        "k2-horizon",
        "It begins with <ifm|tool_calls> and ends with <ifm|tool_call>.\n\n~~~text\n"
        f"{CALLS['k2-horizon']}\n~~~\nSo.",
    ),
    # A whole call of a name that is no tool's, in its section, within a line.
    ("gigachat35", '> (<｜GCML｜tool_calls><｜GCML｜invoke name="NAME"></｜GCML｜invoke>) stands first'),
    ("gigachat35", 'Hm. (<｜GCML｜tool_calls><｜GCML｜invoke name="NAME"></｜GCML｜invoke>) stands first'),
    (
        "deepseek-v4",
        'No <｜DSML｜tool_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="days" string="false">!\n\n'
        f"For example:\n\n~~~\n{CALLS['deepseek-v4']}\n~~~\n\nThat is all.",
    ),
    # Behind noise, and between two tags, prose is no call.
    ("minimax-m3", f'It is {M3}<tool_call>, then {M3}<invoke name="NAME">, {M3}</invoke> and so on.'),
    ("minimax-m3", f'- {M3}<tool_call>: opens\n- {M3}<invoke name="get_weather">: closes'),
    # Nothing follows a section's marker.
    ("hermes", "It begins with <tool_call>"),
    ("granite", "- <|tool_call|>\n- <|tool_call|>"),
    ("phi4-mini-json", "It begins with functools["),
    ("k2-horizon", "It begins with <ifm|tool_calls> and stops with </ifm|tool_calls>."),
    # Straight quotation marks within others, or within a call that is quoted, end no quotation.
    *(
        (name, f"So {one}{CALLS[name]}{two} it is.")
        for one, two in (("„", "“"), ("„", "”"), ("„", '"'), ('"', '"'), ("“", "”"))
        for name in ("hermes", "deepseek-v32", "minimax-m2", "glm45")
    ),
    # The quotation marks of an attribute end no quotation.
    ("minimax-m3", f'So "{M3}<invoke name="x">{M3}<tool_call>" is first.\n\n```xml\n{CALLS["minimax-m3"]}\n```'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), NAMED)
def test_a_tag_that_is_named_is_text(name: str, text: str, tokenizer: Tokenizer) -> None:
    """In an answer, and within thinking, whether it is closed or not."""
    found = {each: (spec, thinking) for each, spec, thinking in formats(tokenizer)}
    spec = found[name][0]
    reply = parsed(spec, None, "<a>", [*text], "stop")
    assert (reply.content, reply.tool_calls) == (text, [])
    assert spec.reasoning is not None
    start, end = spec.reasoning.start, spec.reasoning.end
    for closing, answer in ((f"{end}so", "so"), ("", None)):
        reply = parsed(spec, None, "<a>", [*f"{start}{text}{closing}"], "stop")
        assert (reply.reasoning, reply.content, reply.tool_calls) == (text, answer, [])


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(CALLS.keys() - MACHINES.keys() - {"llama3", "minicpm5", "pythonic", "xlam"}))
@pytest.mark.parametrize("line", ["Never write ({}) there.", "Maybe {}"])
def test_a_section_within_a_line_names_a_tool(name: str, line: str, tokenizer: Tokenizer) -> None:
    """In an answer and in thinking; where it begins a line, any name counts."""
    (spec,) = (spec for each, spec, _ in formats(tokenizer) if each == name)
    assert spec.reasoning is not None
    unknown = CALLS[name].replace("get_weather", "NAME").replace("now", "other")
    for opening in ("", spec.reasoning.start):

        def names(text: str, opening: str = opening) -> list[str]:
            text = f"Hm. {text}"
            reply, cut = (parsed(spec, None, "<a>", chunks, "stop") for chunks in ([opening + text], [*opening + text]))
            found = [call.name for call in reply.tool_calls]
            said = (reply.content or "") + (reply.reasoning or "")
            assert (found, said) == (
                [call.name for call in cut.tool_calls],
                (cut.content or "") + (cut.reasoning or ""),
            )
            assert found or "".join(said.split()) == "".join(text.split())
            return found

        assert "NAME" not in names(line.format(unknown))
        assert names(line.format(CALLS[name])) == ["get_weather", "now"]
        assert names(f"So:\n{unknown}") == ["NAME", "other"]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "glm45"])
def test_a_quoted_call_ends_no_thinking_without_tools(name: str, tokenizer: Tokenizer) -> None:
    """Its second marker begins a line, within the quotation."""
    (spec,) = (spec for each, _, spec in formats(tokenizer) if each == name)
    for text in (f"So ``{CALLS[name]}`` it is.", f"So „{CALLS[name]}“ it is."):
        reply = parsed(spec, None, "<a>", [*f"<think>{text}"], "stop")
        assert (reply.reasoning, reply.content) == (text, None)


@pytest.mark.parametrize(
    "text",
    [
        "Use >>>now\nto get it.",
        "It is\n>>>now",
        "It is >>>now\n",
        "So:\n>>>now\nas `>>>now\n{}` says",
        "So “>>>get_weather\n{}>>>now\n{}” it is.",
    ],
)
def test_functionary_names_a_recipient(text: str, tokenizer: Tokenizer) -> None:
    """Behind an answer a call has an object of arguments."""
    (spec,) = (spec for name, spec, _ in formats(tokenizer) if name == "functionary")
    tail = MACHINES["functionary"]
    for chunks in ([f"all\n{text}"], [*f"all\n{text}"]):
        reply = parsed(spec, None, tail, chunks, "stop")
        assert (reply.content, reply.tool_calls) == (text, [])
    reply = parsed(spec, None, tail, [*f"all\n{text}\n\n>>>now\n{{}}"], "stop")
    assert [call.name for call in reply.tool_calls] == ["now"]
    assert parsed(spec, None, tail, [*"all\nSo.>>>now\n"], "length").content == "So."


@pytest.mark.parametrize("name", sorted(CONTENT_FIRST))
def test_a_call_counts_behind_what_was_named(name: str, tokenizer: Tokenizer) -> None:
    """Two calls on a line of their own, behind code and a quotation that is left open."""
    (spec,) = (spec for each, spec, _ in formats(tokenizer) if each == name)
    text = 'So `x` and ``y``, "z", don\'t:\n\n```py\n1\n```\nIt\u2019s "here\n'
    reply = parsed(spec, None, "<a>", [text + CALLS[name]], "stop")
    assert [call.name for call in reply.tool_calls] == ["get_weather", "now"]


@pytest.mark.parametrize("name", sorted(CONTENT_FIRST))
def test_what_is_named_behind_calls_is_text(name: str, tokenizer: Tokenizer) -> None:
    """In code and in quotation marks, also where nothing ends a section; a call behind that counts."""
    (spec,) = (spec for each, spec, _ in formats(tokenizer) if each == name)
    fence = "~~~" if "```" in CALLS[name] else "```"
    for said in (f"For example:\n\n{fence}\n{CALLS[name]}\n{fence}\nSo.", f"\u201c{CALLS[name]}\u201d it was."):
        text = f"{CALLS[name]}\n\n{said}"
        for chunks in ([text], [*text]):
            reply = parsed(spec, None, "<a>", chunks, "stop")
            assert [call.name for call in reply.tool_calls] == ["get_weather", "now"]
            assert (reply.content or "").strip() == said
        reply = parsed(spec, None, "<a>", [*f"{text}\n\n{CALLS[name]}"], "stop")
        assert [call.name for call in reply.tool_calls] == 2 * ["get_weather", "now"]


@pytest.mark.parametrize(
    "text",
    [
        "    So:\n",
        "So\n    ",
        "> ```xml\n> <tool_call>\n",
        "> ```\n\n",
        "<code>x\n\n",
        "<pre>x</pre>\nan <pre> or <code>\n",
        "So `<pre>` and a<b, <codec>, <p>x\n",
        "12 > 3 - ```x``` and ```xml y\n",
        'It’s 5" or „so\n',
        "So:\n\n    code\nso\n\n",
        "In the '90s. ",
        "I 'm off! ",
        "The ‘90s… ",
        "So `<tool_call> and\n\n",
        "A <script>, a <var> or\n",
        'So {"a":"b","c":1}, x="y" and \'z\'. ',
        "> said\n",
        "10° 5′ 3″. ",
        "<!-- x -->",
        "<!-- `x -->\n",
        'So <!-- and \\begin{verbatim} or """ and\n',
        "So \"\"\"x\"\"\" and '''y'''. ",
        # A quotation of several lines or with another in it, and a mark that nothing opened.
        '"One\ntwo"',
        "So “one\n\ntwo”",
        "«un\ndeux »",
        "„Eins\nzwei“",
        '"One\n"Two"',
        '"שלום\nעולם"',
        'قال "نعم\nلا"',
        "“a “b” c”",
        'She said "it\'s 5" long"',
        'So"',
        # Strings of several lines that begin within one.
        'x = f"""a\nb"""\n',
        "r'''a\n\nb''' ",
        'x = """a\nb"""\n',
        'print("""a\n""")\n',
        '"""A "x" and `y.\n\n"""\n',
        "\\begin{verbatim}\n```\n\\end{verbatim}\n",
        "So \\verb|`| or \\verb and \\begin{document}\n",
        'It is 6\'3""" or "a""b""". ',
        "So `<!--` and\n\n```\n<!--\n```\n",
        "It is 5''\n",
        "f''(x) = 2, so: ",
        "The third derivative f'''(x): ",
        "It is f''' = 0: ",
        'x = f"" ',
        "Ek soek 'n hotel: ",
        "Morgen in 's-Hertogenbosch: ",
        "The '24 forecast: ",
        "'Tis so: ",
        "Rock \u2018n roll: ",
        '^_^"\n',
        "<pre>\n```\n</pre>\n",
        "So `<tool_call>\n```\n` or \u201c<tool_call>\n```\n\u201d.\n",
    ],
)
def test_code_ends(text: str, tokenizer: Tokenizer) -> None:
    """A call behind code, a quote or an element that is over, or was none, counts."""
    (spec,) = (spec for each, spec, _ in formats(tokenizer) if each == "hermes")
    reply = parsed(spec, None, "<a>", [*f"{text}{CALLS['hermes']}"], "stop")
    assert [call.name for call in reply.tool_calls] == ["get_weather", "now"]


def test_a_place_does_not_depend_on_chunks() -> None:
    """Of a text, where a marker may come that is asked for its place."""
    units = ["'", '"', "`", "```", "~~~", "\n", "\n\n", "<code>", "</code>", "<PRE>", ". ", ".", "x", " ", "    "]
    units += ["<!--", "-->", "\\verb|", "|", "\\begin{verbatim}", "\\end{verbatim}", '"""', "'''", "\\"]
    units += ["f", "'n", "(", "ب", "ב", "\t", "\r\n", "> ", "- ", "1. ", "“", "”", "=", "<tool>", "#", "r>", "é", "9"]
    rng = random.Random(41)
    for _ in range(20_000):
        whole, cut = Place(), Place()
        text = ""
        for unit in rng.choices(units, k=rng.randrange(1, 14)):
            if rng.random() < 0.15:
                if text:
                    whole.feed(text)
                text = ""
                for place in (whole, cut):
                    if place.is_quoted:
                        place.hold_call()
            text += unit
            for char in unit:
                cut.feed(char)
        whole.feed(text)
        found = [
            (place.is_quoted, place.begins_line, place.closings, place.passage, place.may_think(ends_sentence=False))
            for place in (whole, cut)
        ]
        assert found[0] == found[1]


def test_talk_makes_no_call() -> None:
    """Random talk about every format; `tests/benchmarks/phantoms.py` reads thousands."""
    assert list(phantoms(270, seed=3)) == []


@pytest.mark.parametrize("name", ["k2-horizon", "glm45", "qwen3-coder"])
def test_a_section_in_a_value_behind_a_keys_tag_is_text(name: str, tokenizer: Tokenizer) -> None:
    """Whitespace stands between the two, of which the second would begin a call elsewhere."""
    (spec,) = (spec for each, spec, _ in formats(tokenizer) if each == name)
    assert spec.tools is not None
    key = {"k2-horizon": "<ifm|arg_key>", "glm45": "<arg_key>", "qwen3-coder": "<parameter="}[name]
    value = f"a {key}\n{spec.tools.start} b"
    for chunks in ([CALLS[name].replace('Rom, "die" Stadt', value)], [*CALLS[name].replace('Rom, "die" Stadt', value)]):
        reply = parsed(spec, None, "<a>", chunks, "stop")
        assert [call.name for call in reply.tool_calls] == ["get_weather", "now"]
        assert json.loads(reply.tool_calls[0].arguments) == {"city": value, "days": 3}
