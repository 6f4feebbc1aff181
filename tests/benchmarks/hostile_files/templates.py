"""Chat templates: grown from a grammar of what costs most, mutated from our own, and too deep or too long."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import jinja2.filters
import jinja2.tests

from dovetail.text.chat.templates import builtin_templates, read_template
from hostile_files.texts import folder
from hostile_files.texts import read as read

NAMES = ["messages", "messages[0].content", "a", "b", "ns.x", "tools", "m", "loop", "loop.index", "none", "m.content"]
NUMBERS = ["0", "1", "2", "7", "99", "9999", "65536", "99999", "10 ** 9", "-1", "2 ** 64", "1.5", "1e300"]
TEXTS = [
    "'x'",
    "''",
    "'a' * 65536",
    "'www.a.b ' * 999",
    "'<!--' * 999",
    "'\\t' * 9999",
    "'\\n' * 9999",
    "'%s%s'",
    "'%(a)s'",
]
METHODS = [
    "upper", "split", "rsplit", "splitlines", "replace", "join", "center", "zfill", "expandtabs", "format", "encode",
    "rfind", "count", "find", "translate", "strip", "items", "keys", "append", "extend", "insert", "pop", "to_bytes",
    "partition", "rpartition", "startswith", "title", "casefold", "fromkeys", "copy", "index", "__class__", "mro",
]  # fmt: skip
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or", "is"]
EACH = ["select", "reject", "map"]
ENDS = ["{% break %}", "{% continue %}", "{{ caller() }}", "{% include 'a' %}", "\n text "]
NESTS = [
    ("{% if a %}", "x", "{% endif %}"), ("{% for a in b %}", "x", "{% endfor %}"), ("{{ (", "1", ") }}"),
    ("{% if a %}{% elif b %}", "x", "{% endif %}"), ("{% set a %}", "x", "{% endset %}"), ("{# ", "", " #}"),
    ("{% macro f() %}", "", "{% endmacro %}"), ("{% raw %}", "", "{% endraw %}"),
    ("{% block b%}", "", "{% endblock %}"),
]  # fmt: skip
INNER_NESTS = [
    ("(", "1", ")"), ("[", "1", "]"), ("{1: ", "1", "}"), ("not ", "a", ""), ("-", "1", ""), ("", "a", ".b"),
    ("", "a", " ~ a"), ("", "a", " + a"), ("", "a", "|trim"), ("", "a", "[0]"), ("", "a", " if a"),
]  # fmt: skip
PIECES = ["{", "{{", "{% ", "x", "{{ a }}", "{% set a = 1 %}", "{#", "'", "\\", "\n", "\0", "\ud800", "{%- if a -%}"]
FILTERS, TESTS = sorted(jinja2.filters.FILTERS), sorted(name for name in jinja2.tests.TESTS if name.isalpha())


class Grower:
    """Grows one template."""

    def __init__(self, rng: random.Random) -> None:
        """`rng` decides."""
        self._rng = rng
        self._left = rng.choice((20, 60, 200, 800))

    def expression(self, depth: int = 0) -> str:
        """Grow an expression."""
        self._left -= 1
        pick = self._rng.choice
        if depth > 6 or self._left < 0:
            return pick([*NAMES, *NUMBERS, *TEXTS])
        inner: Callable[[], str] = lambda: self.expression(depth + 1)  # noqa: E731
        given = ", ".join(inner() for _ in range(self._rng.randrange(3)))
        return pick([
            lambda: pick([*NAMES, *NUMBERS, *TEXTS]),
            lambda: f"range({pick(NUMBERS)})",
            lambda: f"({inner()} {pick(OPERATORS)} {inner()})",
            lambda: f"({inner()} | {pick(FILTERS)}" + (f"({given}))" if given else ")"),
            lambda: f"(range(99999) | {pick(EACH)}('{pick([*FILTERS, *TESTS])}', {inner()}) | list)",
            lambda: f"({inner()}).{pick(METHODS)}({given})",
            lambda: f"({inner()} is {pick(TESTS)})",
            lambda: f"[{given}]",
            lambda: f"({inner()}, {inner()})",
            lambda: f"{{'a': {inner()}, 97: {inner()}}}",
            lambda: f"({inner()} if {inner()} else {inner()})",
            lambda: f"({inner()})[{inner()}]",
            lambda: f"({inner()})[:{pick(NUMBERS)}:{pick(['', '2', '-1'])}]",
            lambda: f"f({given})",
        ])()  # fmt: skip

    def statements(self, depth: int = 0) -> str:
        """Grow some statements."""
        return "".join(self._statement(depth) for _ in range(self._rng.randrange(1, 4)))

    def _statement(self, depth: int) -> str:
        self._left -= 1
        given = self.expression
        if depth > 5 or self._left < 0:
            return f"{{{{ {given(5)} }}}}"
        inner: Callable[[], str] = lambda: self.statements(depth + 1)  # noqa: E731
        condition = f" if {given(3)}" if self._rng.random() < 0.3 else ""
        return self._rng.choice([
            lambda: f"{{{{ {given()} }}}}",
            lambda: f"{{% for m in {given()}{condition} %}}{inner()}{{% endfor %}}",
            lambda: f"{{% for m in range(99999){condition} %}}{inner()}{{% endfor %}}",
            lambda: f"{{% for m in messages{condition} %}}{{{{ m.role }}}}: {{{{ m.content }}}}{inner()}{{% endfor %}}",
            lambda: f"{{% for m in {given()} recursive %}}{inner()}{{{{ loop({given()}) }}}}{{% endfor %}}",
            lambda: f"{{% if {given()} %}}{inner()}{{% else %}}{inner()}{{% endif %}}",
            lambda: f"{{% set a = {given()} %}}",
            lambda: f"{{% set ns.x = {given()} %}}",
            lambda: f"{{% set b %}}{inner()}{{% endset %}}",
            lambda: f"{{% macro f(a, b=1) %}}{inner()}{{% endmacro %}}{{{{ f({given()}) }}}}",
            lambda: f"{{% call f({given()}) %}}{inner()}{{% endcall %}}",
            lambda: f"{{% filter {self._rng.choice(FILTERS)} %}}{inner()}{{% endfilter %}}",
            lambda: self._rng.choice(ENDS),
        ])()  # fmt: skip


def grown(rng: random.Random) -> str:
    """Grow a template that sets what expressions name."""
    start = "{% set ns = namespace(x='ab') %}{% set a = ['x'] %}{% set b = range(9999) | list %}"
    start += "{% macro f(a, b=1) %}{{ a }}{{ b }}{% endmacro %}"
    return start + Grower(rng).statements()


def growing(rng: random.Random) -> str:
    """Apply an expression to its own value, again and again."""
    step = Grower(rng).expression(3).replace("messages[0].content", "ns.x")
    times = rng.choice((30, 300, 99999))
    loop = f"{{% for i in range({times}) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
    return "{% set ns = namespace(x='ab') %}" + loop + "{{ ns.x }}"


def mutated(rng: random.Random) -> str:
    """Cut, repeat, swap and change pieces of a template of ours."""
    source = read_template(rng.choice(builtin_templates()))
    for _ in range(rng.choice((1, 3, 10))):
        at, length = rng.randrange(len(source)), rng.choice((1, 5, 40, 300))
        piece = source[at : at + length]
        source = (
            source[:at] + rng.choice(["", piece * 2, piece[::-1], Grower(rng).expression(4)]) + source[at + length :]
        )
    return source


def deep(rng: random.Random) -> str:
    """Nest something, or put very many after one another."""
    times = rng.choice((19, 30, 99, 300, 3000))
    before, middle, after = rng.choice(NESTS)
    inner = rng.choice(INNER_NESTS)
    if rng.random() < 0.5:
        return "{{ " + inner[0] * times + inner[1] + inner[2] * times + " }}"
    return before * times + middle + after * times


def other(rng: random.Random) -> str:
    """Bytes, very long ones, and those that say a thing without end."""
    size = rng.choice((0, 1, 999, 99_999, 300_000))
    piece = rng.choice(PIECES)
    noise = "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x3000)))) for _ in range(min(size, 999)))
    return rng.choice([piece * (size // len(piece)), noise, "{{ " + noise + " }}"])


KINDS: dict[str, Callable[[random.Random], str]] = {
    "template, grown": grown,
    "template, growing": growing,
    "template, mutated": mutated,
    "template, deep": deep,
    "template, other": other,
}


def files(rng: random.Random, count: int) -> Iterator[tuple[str, Path]]:
    """Yield folders with hostile templates."""
    for _ in range(count):
        kind = rng.choices([*KINDS], [5, 2, 2, 1, 1])[0]
        yield kind, folder("chat_template.jinja", KINDS[kind](rng))
