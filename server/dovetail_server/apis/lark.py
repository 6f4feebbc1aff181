"""Lark grammars as regular expressions: a tool call's text is held to one in whatever form calls are written.

A call's text stands in the reply as a JSON string, between tags or as a Python literal, and no grammar backend can put
a Lark grammar there. A regular expression it can. So a grammar without recursion becomes one; recursion at an
alternative's begin or end is a repetition. What is ignored between terminals is put between them. Every text that Lark
accepts is one of the expression's; where Lark's lexer would have taken a longer terminal, so may be a few more.

Lark's syntax: https://lark-parser.readthedocs.io/en/stable/grammar.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from dovetail.sdk.expressions.reading import UnreadableError, is_plain, read

MAX_CHARS, MAX_RULES, MAX_DEPTH = 1 << 16, 1024, 40
"""Of a grammar, and groups within each other in it."""
MAX_DIGITS = 3
MAX_EXPRESSION = 8000
"""Characters of an expression; rules that are used twice stand in it twice."""
COMMON = {
    "CR": r"\r", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+", "SIGNED_INT": "[+\\-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?|[0-9]+)",
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[a-zA-Z]", "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z_0-9]*", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"//[^\n]*", "SQL_COMMENT": r"--[^\n]*",
}  # fmt: skip
"""Lark's terminals of `common`."""
_TOKEN = re.compile(
    r"""(?P<space>[ \t\f]+|(?://|\#)[^\n]*)|(?P<line>\r?\n)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)|(?P<alias>->\s*\w+)
    |(?P<range>\.\.)|(?P<priority>\.-?\d+)|(?P<count>~\s*\d+(?:\s*\.\.\s*\d+)?)|(?P<word>%?\w+)|(?P<sign>[?*+!|:()\[\],.])
    """,
    re.VERBOSE,
)
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|$)|.", re.DOTALL)
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/\-]")


class NotRegularError(ValueError):
    """A grammar that does not become an expression, and why."""


class Token(NamedTuple):
    """A piece of a grammar."""

    kind: str
    text: str


class LarkRule(NamedTuple):
    """What a name stands for: alternatives, each of which has parts; a part is a text of an expression or a name."""

    options: list[list[LarkPart]]


class LarkPart(NamedTuple):
    """One part of an alternative.

    Attributes:
        text: An expression of a terminal, or the name of a rule or terminal; "" where it is a group.
        is_name: Whether `text` is a name.
        group: The alternatives of a group.
        least: How often it comes at least, and …
        most: … at most; None for any number.
    """

    text: str
    is_name: bool = False
    group: LarkRule | None = None
    least: int = 1
    most: int | None = 1


@lru_cache(maxsize=64)  # agents send theirs with each request
def expression_of(grammar: str) -> str | None:
    """Return an expression of the texts of a Lark grammar, without anchors; None where none is known."""
    try:
        return written_as_expression(grammar)
    except NotRegularError:
        return None


def written_as_expression(grammar: str) -> str:
    """As `expression_of`.

    Raises:
        NotRegularError: It is recursive, too large, or uses what is not known here.
    """
    if len(grammar) > MAX_CHARS:
        raise NotRegularError(f"it has over {MAX_CHARS} characters")
    found = LarkWriter(LarkReader(grammar)).whole()
    check_plain(found)
    return found


def check_plain(expression: str) -> None:
    """Refuse what looks around, or what no backend reads.

    Raises:
        NotRegularError: Saying why.
    """
    try:
        tree = read(expression)
    except (UnreadableError, RecursionError) as error:
        raise NotRegularError(str(error)) from None
    if not is_plain(tree):
        raise NotRegularError("it has look-around or anchors")


class LarkReader:
    """Reads a grammar's statements."""

    def __init__(self, grammar: str) -> None:
        """Read all.

        Raises:
            NotRegularError: It cannot be read.
        """
        self.rules: dict[str, LarkRule] = {}
        self.ignored: list[LarkPart] = []
        for line in statements(grammar):
            self._line, self._at, self._depth = line, 0, 0
            self._statement()
            if len(self.rules) > MAX_RULES:
                raise NotRegularError(f"it has over {MAX_RULES} rules")

    def _statement(self) -> None:
        first = self._line[0].text
        if first == "%import":
            self._import()
        elif first == "%ignore":
            self._at = 1
            self.ignored.append(LarkPart("", group=self._choice(")")))
        elif first.startswith("%"):
            raise NotRegularError(f"{first[:40]} is not known")
        else:
            self._rule()

    def _import(self) -> None:
        """Take `%import common.A`, with `-> B`, or `%import common (A, B)`."""
        words = [token.text for token in self._line[1:] if token.kind == "word"]
        alias = next((token.text[2:].strip() for token in self._line if token.kind == "alias"), None)
        if words[:1] != ["common"] or len(words) < 2:
            raise NotRegularError("it imports from elsewhere than common")
        for name in words[1:]:
            if name not in COMMON:
                raise NotRegularError(f"common.{name[:40]} is not known")
            self.rules[alias or name] = LarkRule([[LarkPart(COMMON[name])]])

    def _rule(self) -> None:
        while self._sees("?") or self._sees("!"):
            self._at += 1
        name = self._take("word").text
        if self._peek().kind == "priority":
            self._at += 1
        if not self._sees(":") or name in self.rules:
            raise NotRegularError(f"the rule {name[:40]} cannot be read")
        self._at += 1
        self.rules[name] = self._choice(")")
        if self._at < len(self._line):
            raise NotRegularError(f"the rule {name[:40]} cannot be read behind {self._line[self._at].text[:40]!r}")

    def _choice(self, end: str) -> LarkRule:
        options: list[list[LarkPart]] = [[]]
        while self._at < len(self._line) and not self._sees(end):
            token = self._line[self._at]
            if token.text == "|":
                self._at += 1
                options.append([])
            elif token.kind == "alias":
                self._at += 1
            else:
                options[-1].append(self._counted(self._part()))
        return LarkRule(options)

    def _part(self) -> LarkPart:
        token = self._line[self._at]
        self._at += 1
        if token.text in ("(", "["):
            end = ")" if token.text == "(" else "]"
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise NotRegularError(f"its groups stand over {MAX_DEPTH} deep")
            group = self._choice(end)
            self._depth -= 1
            if not self._sees(end):
                raise NotRegularError(f"a {token.text!r} is not closed")
            self._at += 1
            return LarkPart("", group=group, least=0 if end == "]" else 1)
        if token.kind == "word":
            return LarkPart(token.text, is_name=True)
        if token.kind == "regex":
            return LarkPart(expression(token.text))
        if token.kind != "string":
            raise NotRegularError(f"{token.text[:40]!r} cannot be read")
        if self._peek().kind == "range":
            self._at += 1
            ends = [unquoted(text)[0] for text in (token.text, self._take("string").text)]
            if any(len(end) != 1 for end in ends):
                raise NotRegularError("a range is of single characters")
            return LarkPart(f"[{escaped(ends[0])}-{escaped(ends[1])}]")
        text, is_folded = unquoted(token.text)
        return LarkPart("".join(folded(char) if is_folded else escaped(char) for char in text))

    def _counted(self, part: LarkPart) -> LarkPart:
        """Take what says how often a part comes."""
        while self._at < len(self._line):
            token = self._line[self._at]
            if token.kind == "count":
                numbers = re.findall(r"\d+", token.text)
                if max(map(len, numbers)) > MAX_DIGITS:
                    raise NotRegularError(f"it repeats something more than {10**MAX_DIGITS - 1} times")
                least: int = int(numbers[0])
                most: int | None = int(numbers[-1])
            elif token.text in ("?", "*", "+"):
                least, most = (1 if token.text == "+" else 0), (1 if token.text == "?" else None)
            else:
                return part
            self._at += 1
            is_plain_part = (part.least, part.most) == (1, 1)
            part = part if is_plain_part else LarkPart("", group=LarkRule([[part]]))
            part = part._replace(least=least, most=most)
        return part

    def _peek(self) -> Token:
        return self._line[self._at] if self._at < len(self._line) else Token("end", "")

    def _sees(self, text: str) -> bool:
        return self._peek().text == text and self._peek().kind == "sign"

    def _take(self, kind: str) -> Token:
        token = self._peek()
        if token.kind != kind:
            raise NotRegularError(f"{token.text[:40]!r} cannot be read")
        self._at += 1
        return token


class LarkWriter:
    """Writes a grammar as an expression."""

    def __init__(self, grammar: LarkReader) -> None:
        """Take what has been read."""
        self._grammar = grammar
        self._open: list[str] = []
        self._written: dict[str, str] = {}
        self._between = ""
        if grammar.ignored:
            self._between = f"(?:{'|'.join(self._part(part, is_terminal=True) for part in grammar.ignored)})*"

    def whole(self) -> str:
        """Return the expression of `start`."""
        return self._between + self._named("start")

    def _named(self, name: str) -> str:
        if name in self._written:
            return self._written[name]
        rule = self._grammar.rules.get(name)
        if rule is None:
            raise NotRegularError(f"there is no rule {name[:40]}")
        if name in self._open or len(self._open) > MAX_DEPTH:
            raise NotRegularError(f"the rule {name[:40]} is recursive, or stands over {MAX_DEPTH} deep")
        self._open.append(name)
        ends = {at: self._taken_out(rule, name, at) for at in (0, -1)}
        plain = [option for option in rule.options if not (len(option) > 1 and self._ends_in_itself(option, name))]
        is_terminal = name.lstrip("_").isupper()
        text = self._options(plain, is_terminal=is_terminal)
        if ends[-1]:
            text = f"(?:{self._options(ends[-1], is_terminal=is_terminal)})*{text}"
        if ends[0]:
            text += f"(?:{self._options(ends[0], is_terminal=is_terminal)})*"
        self._open.pop()
        self._written[name] = checked(text)
        return text

    @staticmethod
    def _ends_in_itself(option: Sequence[LarkPart], name: str) -> bool:
        return is_itself(option[0], name) or is_itself(option[-1], name)

    @staticmethod
    def _taken_out(rule: LarkRule, name: str, at: int) -> list[list[LarkPart]]:
        """Return the alternatives that begin (0) or end (-1) with the rule itself, without it."""
        found = []
        for option in rule.options:
            if len(option) > 1 and is_itself(option[at], name):
                found.append(option[1:] if at == 0 else option[:-1])
        return found

    def _options(self, options: Sequence[Sequence[LarkPart]], *, is_terminal: bool) -> str:
        if not options:
            raise NotRegularError("a rule has no alternative that ends")
        written = ["".join(self._part(part, is_terminal=is_terminal) for part in option) for option in options]
        return checked(written[0] if len(written) == 1 else f"(?:{'|'.join(written)})")

    def _part(self, part: LarkPart, *, is_terminal: bool) -> str:
        if part.group is not None:
            text = self._options(part.group.options, is_terminal=is_terminal)
        elif part.is_name:
            text = self._named(part.text)
        else:
            text = part.text
        is_whole = part.group is None and (not part.is_name or part.text.lstrip("_").isupper())
        if is_whole and not is_terminal and self._between:
            text += self._between
        if (part.least, part.most) == (1, 1):
            return checked(text)
        counts = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((part.least, part.most))
        return checked(f"(?:{text}){counts or f'{{{part.least},{part.most}}}'}")


def is_itself(part: LarkPart, name: str) -> bool:
    """Whether a part is a rule's own name, once."""
    return part.is_name and part.text == name and (part.least, part.most) == (1, 1)


def checked(text: str) -> str:
    """Return an expression that is not too long.

    Raises:
        NotRegularError: It is.
    """
    if len(text) > MAX_EXPRESSION:
        raise NotRegularError(f"its expression has over {MAX_EXPRESSION} characters")
    return text


def statements(grammar: str) -> list[list[Token]]:
    """Divide a grammar into rules and directives.

    Raises:
        NotRegularError: A character that means nothing.
    """
    lines: list[list[Token]] = [[]]
    at = level = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None or found.lastgroup is None:
            raise NotRegularError(f"{grammar[at : at + 20]!r} cannot be read")
        at = found.end()
        token = Token(found.lastgroup, found[0])
        level += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if token.kind == "line" and level <= 0 and lines[-1]:
            lines.append([])
        elif token.text == "|" and not lines[-1] and len(lines) > 1:
            lines.pop()  # a rule goes on in a line that begins so
            lines[-1].append(token)
        elif token.kind not in ("space", "line"):
            lines[-1].append(token)
    return [line for line in lines if line]


def expression(written: str) -> str:
    """Return a terminal `/…/flags` as JSON Schema's dialect has it, in which a dot leaves out more line ends.

    Raises:
        NotRegularError: Flags other than `s` and `u`.
    """
    body, _, flags = written[1:].rpartition("/")
    if set(flags) - set("su"):
        raise NotRegularError(f"the flags {flags[:9]!r} are not known")
    every = r"[\s\S]" if "s" in flags else r"[^\n]"
    text = "".join(every if part == "." else part for part in _PARTS.findall(body.replace(r"\/", "/")))
    check_plain(text)
    return f"(?:{text})"


def unquoted(written: str) -> tuple[str, bool]:
    """Return the text of a string, and whether its letters may be of either case."""
    is_folded = written.endswith("i")
    names = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", '"': '"', "\\": "\\"}

    def meant(found: re.Match[str]) -> str:
        if found[1] not in names:
            raise NotRegularError(f"{found[0]!r} in a string is not known")
        return names[found[1]]

    return re.sub(r"\\(.)", meant, written[1 : -2 if is_folded else -1]), is_folded


def escaped(char: str) -> str:
    """Return a character as an expression."""
    known = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\f": r"\f"}
    return known.get(char) or (f"\\{char}" if _SPECIAL.fullmatch(char) else char)


def folded(char: str) -> str:
    """Return a letter in either case."""
    cases = {char.lower(), char.upper()}
    is_letter = len(cases) == 2 and all(len(case) == 1 for case in cases)
    return f"[{''.join(sorted(cases))}]" if is_letter else escaped(char)
