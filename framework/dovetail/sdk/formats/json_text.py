r"""`JsonText`: one JSON value in text that arrives in pieces: where it ends, and its text as JSON.

Valid JSON passes byte for byte. What models write in its place now and then becomes what they mean:

| written | becomes |
|---|---|
| `'it\'s'` | `"it's"` |
| `True`, `False`, `None` | `true`, `false`, `null` |
| a line break or another control character in a string | its escape |

Work per character is constant.
"""

from __future__ import annotations

import json
import re

MAX_CUT_HEAD = 96
"""Characters of the longest head of a call that is not shown where the output was cut short in it."""
_OUTSIDE = r"[\"'{}\[\]TFN%s]"
_LITERAL_STOP = re.compile(r"[,}\]\s]")
_STRING_STOP = {
    '"': re.compile(r"[\"\\\x00-\x1f]"),
    "'": re.compile(r"['\"\\\x00-\x1f]"),
}
_WORDS = {"T": ("True", "true"), "F": ("False", "false"), "N": ("None", "null")}
_OUTSIDE_STOP = {breaks: re.compile(_OUTSIDE % re.escape(breaks)) for breaks in ("", "<", "<`")}


class JsonText:
    """Reads one value, from its first character on.

    Attributes:
        interrupted: A character of `breaks` was found where JSON has none: the value is not whole.
    """

    __slots__ = ("_depth", "_escaped", "_literal", "_outside", "_quote", "_word", "interrupted")

    def __init__(self, first: str, *, breaks: str = "") -> None:
        """Prepare for a value that begins with `first`; `breaks` is `<`, or `` <` ``, or nothing."""
        self._depth = 0
        self._escaped = False
        self._literal = first not in "\"'{["
        self._quote = ""
        self._word = ""
        self._outside = _OUTSIDE_STOP[breaks]
        self.interrupted = False

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends inside a string."""
        return bool(self._quote)

    def take(self, text: str, pos: int) -> tuple[str, int]:
        """Read on from `pos`.

        Returns:
            The value's text as JSON, and the position behind it, -1 if it goes on behind `text`.
        """
        if self._literal:
            found = _LITERAL_STOP.search(text, pos)
            end = found.start() if found else -1
            return (text[pos:] if end < 0 else text[pos:end]), end
        if not pos and not self._escaped and not self._word:
            stop = _STRING_STOP[self._quote] if self._quote else self._outside
            if stop.search(text) is None:
                return text, -1
        out: list[str] = []
        while pos < len(text):
            if self._escaped:
                self._escaped = False
                out.append("'" if text[pos] == "'" else "\\" + text[pos])
                pos += 1
                continue
            if self._word:
                pos = self._read_word(text, pos, out)
                continue
            found = (_STRING_STOP[self._quote] if self._quote else self._outside).search(text, pos)
            if found is None:
                out.append(text[pos:])
                break
            at = found.start()
            out.append(text[pos:at])
            if self._step(text[at], out):
                return "".join(out), at + (not self.interrupted)
            pos = at + 1
        return "".join(out), -1

    def rest(self) -> str:
        """Return what is held back: the text ended."""
        word, self._word = self._word, ""
        return word + "\\" * self._escaped

    def _step(self, char: str, out: list[str]) -> bool:
        """Take a character that means something; True if it ends the value."""
        if self._quote:
            return self._step_in_string(char, out)
        if char in _WORDS:
            self._word = char
            return False
        if char in "\"'":
            self._quote = char
            out.append('"')
            return False
        if char in "<`":
            self.interrupted = True
            return True
        out.append(char)
        self._depth += 1 if char in "{[" else -1
        return self._depth <= 0

    def _step_in_string(self, char: str, out: list[str]) -> bool:
        if char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""
            out.append('"')
            return not self._depth
        else:
            out.append(json.dumps(char)[1:-1])
        return False

    def _read_word(self, text: str, pos: int, out: list[str]) -> int:
        """Read on in a word of Python; return where reading goes on."""
        python, plain = _WORDS[self._word[0]]
        while pos < len(text) and len(self._word) < len(python) and text[pos] == python[len(self._word)]:
            self._word += text[pos]
            pos += 1
        if pos < len(text) or self._word == python:
            out.append(plain if self._word == python else self._word)
            self._word = ""
        return pos
