"""Python literals to JSON text, without running or compiling anything: for models that write calls as Python."""

from __future__ import annotations

import json
import re

_MAX_DEPTH = 64
_STRING = r"[rRuU]?(?:\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')"
_TOKEN = re.compile(
    rf"\s*(?:(?P<string>{_STRING})|(?P<number>[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d+)(?:[eE][-+]?\d+)?)|(?P<word>[^\W\d]\w*)|(?P<mark>[\[\](){{}},:]))",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": "", "0": "\0"}
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def literal_json(text: str) -> str | None:
    """Return a literal's JSON text, or None where `text` is no literal.

    Strings, numbers, lists, tuples, sets, dictionaries, `True`, `False` and `None` are read, and JSON's spelling of the
    last three. JSON's numbers keep theirs. Work is linear in the text.
    """
    reader = _LiteralReader(text)
    try:
        found = reader.value(0)
        reader.end()
    except ValueError:
        return None
    return found


class _LiteralReader:
    """Reads one literal by recursive descent, to a bounded depth."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0

    def value(self, depth: int) -> str:
        """Read one value, and return its JSON text."""
        kind, token = self._next()
        if kind == "string":
            parts = [_unquoted(token)]
            while self._peek() == "string":
                parts.append(_unquoted(self._next()[1]))
            # Halves of a surrogate pair that escapes wrote apart become the character they mean.
            return _quoted("".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        if kind == "number":
            return _number(token)
        if kind == "word" and token in _WORDS:
            return _WORDS[token]
        if kind == "mark" and token in _CLOSING and depth < _MAX_DEPTH:
            return self._items(token, depth)
        raise ValueError(token)

    def end(self) -> None:
        """Insist that nothing follows."""
        if self._text[self._pos :].strip():
            raise ValueError("more text")

    def _items(self, opening: str, depth: int) -> str:
        closing = _CLOSING[opening]
        items: list[str] = []
        pairs: dict[str, str] = {}
        has_comma = False
        while not self._take(closing):
            item = self.value(depth + 1)
            if opening == "{" and self._take(":"):
                pairs[item if item[0] == '"' else _quoted(item)] = self.value(depth + 1)
            else:
                items.append(item)
            if not self._take(","):
                if not self._take(closing):
                    raise ValueError("comma expected")
                break
            has_comma = True
        if pairs and items:
            raise ValueError("neither a set nor a dictionary")
        if opening == "{" and not items:
            return "{" + ", ".join([f"{key}: {value}" for key, value in pairs.items()]) + "}"
        return items[0] if opening == "(" and len(items) == 1 and not has_comma else f"[{', '.join(items)}]"

    def _next(self) -> tuple[str, str]:
        found = _TOKEN.match(self._text, self._pos)
        if found is None or found.lastgroup is None:
            raise ValueError("no token")
        self._pos = found.end()
        return found.lastgroup, found[found.lastgroup]

    def _peek(self) -> str | None:
        found = _TOKEN.match(self._text, self._pos)
        return None if found is None else found.lastgroup

    def _take(self, mark: str) -> bool:
        found = _TOKEN.match(self._text, self._pos)
        if found is None or found["mark"] != mark:
            return False
        self._pos = found.end()
        return True


def _number(token: str) -> str:
    if _JSON_NUMBER.fullmatch(token):
        return token  # which may be larger, or more exact, than a float is
    digits = token.replace("_", "")
    value = float(digits) if any(char in digits for char in ".eE") else int(digits)
    return json.dumps(value, allow_nan=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unquoted(token: str) -> str:
    """Return what a quoted string stands for."""
    raw = token[0] in "rR"
    body = token[2:-1] if token[0] in "rRuU" else token[1:-1]
    return body if raw else _ESCAPE.sub(_escape, body)


def _escape(found: re.Match[str]) -> str:
    two, four, eight, octal, plain = found.groups()
    if code := two or four or eight:
        number = int(code, 16)
        return chr(number) if number <= 0x10FFFF else found[0]
    if octal:
        return chr(int(octal, 8))
    return str(_PLAIN.get(plain, plain if plain in "\\'\"" else found[0]))
