r"""EBNF as llama.cpp writes it (GBNF), and xgrammar's dialect of it, as a tree; and as Lark for llguidance.

```
root  ::= "yes" | digit+ ("," digit{2,4})*   # comment
digit ::= [0-9] | "\x41" | [^\n\]] | .
```

A grammar describes characters: `[a-z]* "end"` matches `endend`. Lark's terminals are cut greedily and would not, so
a grammar without recursion is written as one regular expression, and any other with terminals of one character.

Rules end where the next `name ::=` begins; line ends mean nothing. Defined by llama.cpp's grammars/README.md and
xgrammar's documentation of its EBNF. Their tokens (`<[12]>`) and lookahead (`(= …)`) are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_REGEX = 16 * 1024
MAX_REPEAT = 2**31 - 1
"""The library counts, however many there are: it does not write them out."""
MAX_DEPTH = 200
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<define>[A-Za-z_][\w.-]*\s*::=)
    |(?P<name>[A-Za-z_][\w.-]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<class>\[\^?(?:[^\]\\]|\\.)*\])
    |(?P<repeat>\{\s*\d+\s*(?:,\s*\d*\s*)?\}|[*+?])
    |(?P<mark>[()|.])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[uU]\{([0-9A-Fa-f]+)\}|(.))|(.)", re.DOTALL
)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "e": "\x1b"}


class GbnfError(ValueError):
    """The grammar uses what is not read here."""


@dataclass(frozen=True, slots=True)
class GbnfText:
    """Characters."""

    value: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of some ranges, or of all others."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class GbnfRule:
    """What another rule says."""

    name: str


@dataclass(frozen=True, slots=True)
class GbnfParts:
    """Parts behind each other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class GbnfAlternation:
    """One of some parts."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class GbnfRepeat:
    """A part, from `low` to `high` times; None: any number."""

    part: Part
    low: int
    high: int | None


Part = GbnfText | Chars | GbnfRule | GbnfParts | GbnfAlternation | GbnfRepeat
ANY = Chars((), negated=True)


@dataclass(slots=True)
class _GbnfTokens:
    source: str
    items: list[tuple[str, str, int]] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        place = 0
        while place < len(self.source):
            found = _TOKEN.match(self.source, place)
            if found is None:
                raise GbnfError(f"cannot read {self.source[place : place + 20]!r} {self.where(place)}")
            if found.lastgroup != "space":
                self.items.append((found.lastgroup or "", found.group(), place))
            place = found.end()

    def where(self, place: int) -> str:
        """Say where in the source a place is."""
        line = self.source.count("\n", 0, place)
        return f"(line {line + 1}, column {place - self.source.rfind(chr(10), 0, place)})"

    @property
    def kind(self) -> str:
        """Of the next token; empty at the end."""
        return self.items[self.at][0] if self.at < len(self.items) else ""

    @property
    def text(self) -> str:
        """The next token."""
        return self.items[self.at][1] if self.at < len(self.items) else "the end"

    def wrong(self, what: str) -> ValueError:
        """Word a fault at the next token."""
        place = self.items[self.at][2] if self.at < len(self.items) else len(self.source)
        return ValueError(f"{what}, not {self.text!r} {self.where(place)}")


def parse(source: str) -> dict[str, Part]:
    """Read a grammar's rules.

    Raises:
        GbnfError: It uses what is not read here.
        ValueError: It is wrong; the message names the place.
    """
    tokens, rules = _GbnfTokens(source), {}
    while tokens.kind:
        if tokens.kind != "define":
            raise tokens.wrong("a rule `name ::= …` was expected")
        name = tokens.text.removesuffix("::=").strip()
        tokens.at += 1
        if name in rules:
            raise ValueError(f"the rule {name!r} is defined twice")
        rules[name] = _choice(tokens, 0)
    if "root" not in rules:
        raise ValueError("there is no rule `root`")
    missing = sorted(
        {part.name for rule in rules.values() for part in _walk(rule) if isinstance(part, GbnfRule)} - set(rules)
    )
    if missing:
        raise ValueError(f"the rule {missing[0]!r} is not defined")
    return rules


def _choice(tokens: _GbnfTokens, depth: int) -> Part:
    if depth > MAX_DEPTH:
        raise ValueError(f"the grammar is nested more than {MAX_DEPTH} deep")
    parts = [_sequence(tokens, depth)]
    while tokens.text == "|" and tokens.kind == "mark":
        tokens.at += 1
        parts.append(_sequence(tokens, depth))
    return parts[0] if len(parts) == 1 else GbnfAlternation(tuple(parts))


def _sequence(tokens: _GbnfTokens, depth: int) -> Part:
    parts: list[Part] = []
    while tokens.kind in ("name", "text", "class") or (tokens.kind == "mark" and tokens.text in "(."):
        part = _item(tokens, depth)
        while tokens.kind == "repeat":
            part = _repeated(part, tokens.text)
            tokens.at += 1
        parts.append(part)
    return parts[0] if len(parts) == 1 else GbnfParts(tuple(parts))


def _item(tokens: _GbnfTokens, depth: int) -> Part:
    kind, text = tokens.kind, tokens.text
    tokens.at += 1
    if kind == "text":
        return GbnfText("".join(char for char, _ in _characters(text[1:-1])))
    if kind == "class":
        return _ranges(text)
    if kind == "name":
        if tokens.text == "(" and tokens.items[tokens.at][2] == tokens.items[tokens.at - 1][2] + len(text):
            raise GbnfError(f"the function {text!r} is not read")
        return GbnfRule(text)
    if text == ".":
        return ANY
    inner = _choice(tokens, depth + 1)
    if tokens.text != ")":
        raise tokens.wrong("`)` was expected")
    tokens.at += 1
    return inner


def _repeated(part: Part, text: str) -> Part:
    if text in "*+?":
        return GbnfRepeat(part, int(text == "+"), 1 if text == "?" else None)
    low, comma, high = text.strip("{}").partition(",")
    most = int(low) if not comma else int(high) if high.strip() else None
    if max(int(low), most or 0) > MAX_REPEAT or (most is not None and most < int(low)):
        raise ValueError(f"the repetition {text} is wrong, or above {MAX_REPEAT}")
    return GbnfRepeat(part, int(low), most)


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """Yield characters, and whether each was escaped.

    Raises:
        ValueError: An escaped letter or number is that of no character.
    """
    for found in _ESCAPE.finditer(text):
        number = found[1] or found[2] or found[3] or found[4]
        if number is not None:
            if int(number, 16) > 0x10FFFF or 0xD800 <= int(number, 16) <= 0xDFFF:
                raise ValueError(f"{found[0]} stands for no character; write one beyond U+FFFF as \\U0001F600")
            yield chr(int(number, 16)), True
        elif found[5] is not None:
            if found[5].isalnum() and found[5] not in _LETTERS:
                raise ValueError(f"\\{found[5]} stands for no character; write the characters out, such as [0-9]")
            yield _LETTERS.get(found[5], found[5]), True
        else:
            yield found[6], False


def _ranges(text: str) -> Chars:
    negated = text.startswith("[^")
    given = list(_characters(text[1 + negated : -1]))
    ranges, at = [], 0
    while at < len(given):
        low, high = given[at][0], given[at][0]
        if at + 2 < len(given) and given[at + 1] == ("-", False):
            high, at = given[at + 2][0], at + 2
            if high < low:
                raise ValueError(f"the range {low}-{high} in {text} is empty")
        ranges.append((low, high))
        at += 1
    if not ranges and not negated:
        raise ValueError("[] matches nothing")
    return Chars(tuple(ranges), negated)


def _walk(part: Part) -> Iterator[Part]:
    stack = [part]
    while stack:
        found = stack.pop()
        yield found
        if isinstance(found, GbnfRepeat):
            stack.append(found.part)
        elif isinstance(found, (GbnfParts, GbnfAlternation)):
            stack += found.parts


def to_lark(source: str, prefix: str = "") -> str:
    """Return a grammar as Lark that means the same, character by character; its start rule comes first.

    Args:
        source: The grammar.
        prefix: Of the names of its rules, where it is a part of another; `start` is one that stands alone.

    Raises:
        GbnfError: It uses what is not read here.
        ValueError: It is wrong.
    """
    rules = parse(source)
    regex = as_regex(rules)
    return f"{prefix or 'start'}: /{regex}/\n" if regex else _by_characters(rules, prefix)


def as_regex(rules: dict[str, Part]) -> str | None:
    """Return a grammar without recursion as a regular expression; None with recursion, or where it gets too long."""
    made: dict[str, str] = {}
    for name in _in_order(rules):
        if name is None:
            return None
        made[name] = _regex(rules[name], made)
        if len(made[name]) > MAX_REGEX:
            return None
    return made["root"] or "(?:)"


def _in_order(rules: dict[str, Part]) -> Iterator[str | None]:
    """Yield what `root` needs, each rule behind those that it refers to; None where that cannot be."""
    needs = {name: {p.name for p in _walk(rule) if isinstance(p, GbnfRule)} for name, rule in rules.items()}
    done: set[str] = set()
    stack: list[tuple[str, bool]] = [("root", False)]
    open_: set[str] = set()
    while stack:
        name, is_ready = stack.pop()
        if name in done:
            continue
        if is_ready:
            done.add(name)
            open_.discard(name)
            yield name
            continue
        open_.add(name)
        stack.append((name, True))
        for other in needs[name]:
            if other in open_:
                yield None
                return
            stack.append((other, False))


def _regex(part: Part, made: dict[str, str]) -> str:
    if isinstance(part, GbnfText):
        return "".join(map(_escaped, part.value))
    if isinstance(part, Chars):
        return _class(part)
    if isinstance(part, GbnfRule):
        return f"(?:{made[part.name]})"
    if isinstance(part, GbnfParts):
        return "".join(_grouped(item, made) for item in part.parts)
    if isinstance(part, GbnfAlternation):
        return "|".join(_regex(item, made) for item in part.parts)
    return f"(?:{_regex(part.part, made)}){_times(part)}"


def _grouped(part: Part, made: dict[str, str]) -> str:
    text = _regex(part, made)
    return f"(?:{text})" if isinstance(part, GbnfAlternation) else text


def _times(part: GbnfRepeat) -> str:
    return f"{{{part.low},{'' if part.high is None else part.high}}}"


def _by_characters(rules: dict[str, Part], prefix: str) -> str:
    rules = {"root": rules["root"], **rules}
    names = {name: f"{prefix or 'r'}_{number}" for number, name in enumerate(rules)}
    names["root"] = prefix or "start"
    return "\n".join(f"{names[name]}: {_lark(rule, names)}" for name, rule in rules.items()) + "\n"


def _lark(part: Part, names: dict[str, str]) -> str:
    if isinstance(part, GbnfText):
        return " ".join(json.dumps(char, ensure_ascii=False) for char in part.value) or '""'
    if isinstance(part, Chars):
        return f"/{_class(part)}/"
    if isinstance(part, GbnfRule):
        return names[part.name]
    if isinstance(part, GbnfParts):
        return " ".join(_lark_grouped(item, names) for item in part.parts) or '""'
    if isinstance(part, GbnfAlternation):
        return " | ".join(_lark(item, names) for item in part.parts)
    if part.high == 0:
        return '""'
    plain = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((part.low, part.high))
    return f"({_lark(part.part, names)}){plain or _times(part)}"


def _lark_grouped(part: Part, names: dict[str, str]) -> str:
    text = _lark(part, names)
    return f"({text})" if isinstance(part, GbnfAlternation) else text


def _class(part: Chars) -> str:
    if not part.ranges:
        return r"[\s\S]"
    inner = "".join(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in part.ranges)
    return f"[{'^' * part.negated}{inner}]"


def _escaped(char: str) -> str:
    if char.isalnum() or (ord(char) > 0xA0 and char.isprintable()) or char in " _":
        return char
    return f"\\x{ord(char):02x}" if ord(char) < 0x80 else f"\\x{{{ord(char):x}}}"
