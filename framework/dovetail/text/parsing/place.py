"""`Place`: where a text of Markdown ends, so that a tag that is quoted is told from one that counts.

A model that explains its format writes tags in code or behind a quotation mark; a tag that it means stands elsewhere.
Code is what stands between runs of backticks in one line, and between fences. All work is linear in the text.
"""

# ruff: noqa: RUF001 - quotation marks of many languages

from __future__ import annotations

import re

SIGNS = "\n`~\"'“”‘’«»„"
"""Text without any of these changes nothing but the last character, once a line has begun."""
_MAX_INDENT = 3
"""Blanks before what begins a line; more of them are code."""
_CLOSING = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "„": "“”"}
"""What closes what a quotation mark opens, in the same line."""
_SIGN = re.compile(f"[{SIGNS}]")
_PART = re.compile("\n|`+|~+|[\"'“”‘’«»„]|[^" + SIGNS + "]+")
_BEHIND_WORD = re.compile(r"[\w.,;:!?)\]}>=]")
"""A quotation mark behind it opens nothing: it closes, or stands in a tag or for a letter."""


class Place:
    """Follows a text from its beginning.

    Attributes:
        last: The end of the text, at least a character. Whoever leaves out text without `SIGNS` sets it.
    """

    __slots__ = ("_attribute", "_closes", "_fence", "_is_blank", "_line", "_opens", "_quote", "_run", "_span", "last")

    def __init__(self) -> None:
        """Begin a text."""
        self.last = ""
        self._fence = ""
        """The fence that is open."""
        self._run = ""
        """Backticks or tildes that end the text and may go on."""
        self._new_line()

    def _new_line(self) -> None:
        self._is_blank = True
        """Whether the line holds only blanks so far, which are `_line`."""
        self._line = ""
        self._span = 0
        """Backticks of the code that is open in this line."""
        self._quote = ""
        """What closes the quotation that is open in this line."""
        self._attribute = ""
        """What closes the value of a tag's attribute that is open within the quotation."""
        self._opens = ""
        """The fence that this line opens unless backticks follow."""
        self._closes = False
        """Whether this line closes the fence unless text follows."""

    @property
    def is_settled(self) -> bool:
        """Whether text without `SIGNS` changes only `last`."""
        return not (self._is_blank or self._run or self._closes)

    @property
    def begins_line(self) -> bool:
        """Whether the text ends where a line begins, outside of code."""
        return self._is_blank and len(self._line) <= _MAX_INDENT and "\t" not in self._line and not self.is_quoted

    @property
    def is_quoted(self) -> bool:
        """Whether the text ends in code, or in a quotation."""
        self._end_run()
        return bool(self._span or self._opens or self._quote or (self._fence and not self._closes))

    def feed(self, text: str) -> None:
        """Take more text, not empty."""
        if self._is_blank or self._run or self._closes or _SIGN.search(text) is not None:
            for part in _PART.findall(text):
                self._take(part)
                self.last = part
        self.last = text

    def _take(self, part: str) -> None:
        if part == "\n":
            self._end_run()
            if self._closes or self._opens:
                self._fence = self._opens
            self._new_line()
        elif part[0] in "`~":
            if self._run[:1] != part[0]:
                self._end_run()
            self._run += part
        else:
            self._end_run()
            if len(part) == 1 and part in "\"'“”‘’«»„":
                self._mark(part)
            if part.isspace() and (self._is_blank or self._closes):
                self._line += part
            else:
                self._is_blank = self._closes = False

    def _mark(self, mark: str) -> None:
        """Take a quotation mark."""
        if self._attribute:
            self._attribute = "" if mark == self._attribute else self._attribute
        elif self._quote and mark in self._quote:
            if self.last[-1:] == "=":
                self._attribute = mark
            else:
                self._quote = ""
        elif self._quote:
            return
        elif _BEHIND_WORD.match(self.last[-1:]) is None:
            self._quote = _CLOSING.get(mark, "")

    def _end_run(self) -> None:
        """A run of backticks or tildes is over: it opens or closes code, or is text."""
        run, self._run = self._run, ""
        if not run:
            return
        was_blank, self._is_blank = self._is_blank, False
        if self._fence:
            self._closes = was_blank and run.startswith(self._fence)
        elif was_blank and len(run) >= 3:
            self._opens = run
        elif run[0] == "`":
            if self._opens[:1] == "`":
                self._span, self._opens = len(self._opens), ""
            self._span = 0 if self._span == len(run) else self._span or len(run)
