"""`Place`: where a text of Markdown ends, so that a tag that is quoted is told from one that counts.

A model that explains its format writes tags in code or behind a quotation mark; a tag that it means stands elsewhere.
Code is what stands between runs of backticks in one line, between fences, in lines that are indented at the beginning
or behind an empty one, in HTML's elements for code and in its comments, between three quotation marks, and what LaTeX
prints as it stands. A line behind `>` is a quotation. Backticks and quotation marks before the tag of a call, or at the
end of a line, hold all up to what closes them, or an empty line. All work is linear in the text.
"""

# ruff: noqa: RUF001 - quotation marks of many languages

from __future__ import annotations

import re
from collections.abc import Sequence

_CLOSING = {
    '"': '"', "'": "'", "“": "”", "”": "”", "‘": "’", "«": "»", "»": "«»", "‹": "›", "›": "‹›", "„": "“”\"", "‚": "‘’'",
    "「": "」", "『": "』", "｢": "｣", "《": "》", "〈": "〉", "〝": "〞〟", "＂": "＂", "＇": "＇", "″": "″",
}  # fmt: skip
"""What closes what a quotation mark opens, in the same line."""
_APOSTROPHES = ("'", "’")
"""What closes a quotation, unless what opened it stands for a letter: the '90s."""
_STRAIGHT, _BEFORE_QUOTED = ('"', "″", "＂"), (*"([{<=:",)
"""Marks that open and close; what one that closes does not stand behind, nor behind a blank."""
_STOPS = tuple(".!?…")
STOPS = frozenset(".!?…。！？")
"""What ends a sentence, behind which thinking may begin in a line."""
_BEHIND_STOP = " \t\r\n\"'”’»)*_"
"""What may stand behind that."""
_SENTENCE = re.compile(r"[.!?…]\s")
_MARKS = "".join(sorted(set("".join((*_CLOSING, *_CLOSING.values())))))
SIGNS = f"\n`~<\\{_MARKS}"
"""Text without any of these changes nothing but the last character, once a line has begun."""
_MAX_INDENT = 3
"""Blanks before what begins a line; more of them are code."""
_MAX_LEAD = 80
"""Characters before a line's text that are looked at."""
_CLASS = SIGNS.replace("\\", r"\\")
_SIGN = re.compile(f"[{_CLASS}]")
_PART = re.compile(rf"\n|`+|~+|[<\\{_MARKS}]|[^{_CLASS}]+")
_OPENERS = "“‘«‹„‚「『｢《〈〝"
"""Quotation marks that open also behind a word."""
_BEHIND_WORD = re.compile(r"(?![\u0600-\u06ff\u2e80-\u9fff\uf900-\ufaff])(?:[^\W_]|[.!?)\]}>▷^]|[,;:](?=['’]))")
"""Another quotation mark behind it opens nothing: it closes, or stands for a letter. Where no blanks are written
between words, or not behind short ones as in Arabic, it opens."""
_PREFIX = re.compile(r"[A-Za-z]\"\"\"|[bBfFrRuU]'''")
"""Three marks that open a string with a prefix of Python's, or another language's: `r\"\"\"`."""
_PRIME = re.compile(r"[ \t(),.;:=+*/^-]")
"""Behind three single marks, it shows that they are no string's, but a function's third derivative."""
_ELIDED = re.compile(
    r"(?:\d\ds?|[kmnrst]|ns|em|er|til|till|tis|twas|twere|twill|twould|cause|cos|cuz|bout|round)(?=[^\w'’])", re.I
)
"""Behind a mark, it shows that the mark stands for letters: the '90s, 'tis, Afrikaans 'n, Dutch 's."""
_MAX_ELIDED = 8
"""Characters that are looked at behind such a mark."""
_MAY_LEAD = re.compile(r"(?:[ \t\r>*+-]|\d[.)]?)*")
"""What may become `_LEAD`."""
_LEAD = re.compile(r"(?:[ \t]*(?:>|(?:[-*+]|\d{1,9}[.)])(?=[ \t])))*[ \t\r]*")
"""Blanks and the marks of quotes and lists, before the text of a line."""
_QUOTE = re.compile(r"[ \t>]*")
_INFO = re.compile(r"[\w+.-]*")
_BLOCKS = ("pre", "xmp", "listing", "textarea", "script")
"""HTML's elements for code that go on behind an empty line, and those that do not."""
_ELEMENTS = (*_BLOCKS, "code", "kbd", "samp", "tt", "var")
_TAG = re.compile(rf"<(/?)({'|'.join(_ELEMENTS)})(?:\s[^<>]{{0,80}})?>", re.IGNORECASE)
_BEGINNINGS = sorted({name[:size] for name in _ELEMENTS for size in range(len(name))}, key=len, reverse=True)
_MAY_TAG = re.compile(
    rf"<(?:/?(?:(?:{'|'.join(_ELEMENTS)})(?:\s[^<>]{{0,80}})?|{'|'.join(_BEGINNINGS)})|!-?)"
    r"|\\(?:v|ve|ver|verb\*?|b|be|beg|begi|begin(?:\{[a-z]{0,10}\*?)?)?",
    re.IGNORECASE,
)
_OPENS_RAW = re.compile(
    r"(?P<comment><!--)|\\verb\*?(?P<verb>[^\w\s*])|\\begin\{(?P<block>(?:[vV]erbatim|lstlisting|minted|alltt)\*?)\}"
)
_MAX_RUN = 256
"""Backticks or tildes of a run, at most: longer ones count as of that length."""
_MAX_CLOSING = 24
"""Characters of what closes text that is printed as it stands, at most."""


class Place:
    """Follows a text from its beginning.

    Attributes:
        last: The end of the text, at least a character. A caller that skips text without `SIGNS` sets it.
        passage: The number of the part in which the text ends: of a line up to what a quotation closes, or of code in
            lines of its own.
    """

    __slots__ = (
        "_attribute", "_behind", "_closes", "_element", "_fence", "_has_text", "_holds_call", "_in_quote", "_inert",
        "_is_blank", "_is_code", "_is_doubled", "_is_fresh", "_is_info", "_is_kept", "_is_prime", "_lead", "_left",
        "_left_raw",
        "_mark_begins", "_may_indent", "_opens", "_quote", "_raw", "_raw_end", "_run", "_span", "_tag",
        "_tag_begins", "last", "passage",
    )  # fmt: skip

    def __init__(self, *, behind_call: bool = False) -> None:
        """Begin a text: indented, it is code, unless it stands behind a call or in a section, where calls may be."""
        self.last = ""
        self._fence = ""
        """The fence that is open."""
        self._in_quote = False
        """Whether it stands in a quote (`>`), with which it ends."""
        self._run = ""
        """Backticks or tildes that end the text and may go on."""
        self._element = ""
        """The element of HTML for code that is open."""
        self._is_kept = False
        """Whether it goes on in the next line: it began one."""
        self._raw = self._raw_end = ""
        """What closes the text that is printed as it stands; the end of that text, in which it may have begun."""
        self._is_fresh = False
        """Whether only blanks stand in such text, which goes on in the next line then."""
        self._is_doubled = self._mark_begins = False
        """Whether the last quotation was empty; whether its mark began a line."""
        self._inert, self._is_prime = "", False
        """The last mark that opened nothing, with what it stands behind and the same marks that follow; whether three
        of them may be a derivative's."""
        self._is_info = False
        """Whether nothing but a language's name follows the backticks that opened code in a line."""
        self._tag_begins = False
        """Whether the tag of `_tag` begins the line."""
        self._has_text = self._may_indent = not behind_call
        """Whether an indented line is code: it begins the text, or follows an empty line, or a line of such code."""
        self._holds_call = False
        """Whether the code or quotation that is open within the line holds the tag of a call."""
        self.passage = 0
        self._quote = self._left = self._left_raw = ""
        """What closes the quotation, and the text that is printed as it stands, that an earlier line opened."""
        self._new_line()

    def _new_line(self) -> None:
        self._is_blank = True
        """Whether the line holds only blanks and marks of quotes and lists so far, which are `_lead`."""
        self._lead = self._attribute = self._behind = self._opens = ""
        """Besides: what closes an attribute's value, or another quotation, that is open within the quotation; the
        beginning of what stands behind the mark that opened a quotation; the fence that this line opens unless
        backticks follow."""
        self._is_code = self._closes = False
        """Whether the line's text is indented code; whether this line closes the fence unless text follows."""
        if not self._holds_call:
            self._span = 0
            """Backticks of the code that is open in this line."""
            if self._quote and self._quote not in _APOSTROPHES:
                self._left = self._quote
            self._quote = ""
            """What closes the quotation that is open in this line."""
        self._tag: str | None = None
        """What stands from `<` or a backslash on, as long as it may begin or end code."""

    @property
    def is_settled(self) -> bool:
        """Whether text without `SIGNS` changes only `last`."""
        is_open = self._run or self._closes or self._is_info or self._raw or (self._quote and self._may_be_apostrophe)
        return not (self._is_blank or is_open or self._tag is not None)

    @property
    def _may_be_apostrophe(self) -> bool:
        """Whether a mark opened a quotation that is none if a sentence ends in it."""
        return self._quote in _APOSTROPHES and not self._holds_call

    @property
    def is_blank(self) -> bool:
        """Whether the line holds only blanks and marks of quotes and lists so far, be it code or not."""
        return self._is_blank and not self._run

    @property
    def begins_line(self) -> bool:
        """Whether the text ends where a line begins, outside of code."""
        is_near = len(self._lead) <= _MAX_INDENT and not self._lead.strip(" ")
        return self._is_blank and is_near and not self.is_quoted

    @property
    def is_quoted(self) -> bool:
        """Whether the text ends in code, or in a quotation."""
        self._end_run()
        is_code = self._is_deep if self._is_blank else self._is_code
        in_fence = self._fence and not (self._closes or (self._is_blank and self._ends_quote))
        is_quote = ">" in self._lead and ">" in _LEAD.match(self._lead)[0]  # type: ignore[index]  # as in _take_lead
        quote = "" if self._may_be_apostrophe and self.last.endswith(_STOPS) else self._quote
        is_within = self._span or self._opens or quote or self._element or self._raw or self._opens_here
        return bool(is_code or is_within or in_fence or is_quote)

    @property
    def closings(self) -> Sequence[str]:
        """What closes, one or the other, the code or quotation in which the text ends within a line."""
        run = "`" * (self._span or (self._opens[:1] == "`" and len(self._opens)))
        element = self._element and f"</{self._element}"
        return [text for text in (run, element, self._raw, *self._quote, *self.partners) if text]

    @property
    def partners(self) -> str:
        """What closes, one or the other, what the mark would open with which the text ends."""
        return "`" if self.last[-1:] == "`" else _CLOSING.get(self.last, "")

    def may_think(self, ends_sentence: bool) -> bool:
        """Whether thinking may begin here, outside of code and quotations: with a line, or behind a sentence or word.

        Words that are written without blanks between them, as in Chinese, are none: there a tag is named like that.
        """
        if self.is_quoted:
            return False
        is_behind = ends_sentence or (self.last[-1:].isalnum() and self.last[-1] < "\u0590")
        return self.begins_line or (is_behind and not self._is_blank)

    def __copy__(self) -> Place:
        """Return another, in half of the time of a copy by `pickle`'s protocol."""
        other = Place.__new__(Place)
        for name in Place.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def hold_call(self) -> None:
        """The tag of a call, or of thinking, follows, which only is named: what it stands in ends where that is closed.

        Call it where the text ends in code or a quotation.
        """
        if self._opens_here:
            self._quote = _CLOSING.get(self.last, "")
        self._holds_call = bool(self._span or self._quote)
        self._is_kept = True

    @property
    def _opens_here(self) -> bool:
        """Whether a mark that closes nothing would quote what follows: Hebrew writes short words together."""
        is_mark = self.last == self._inert[1:] not in _APOSTROPHES
        return is_mark and "א" <= self._inert[:1] <= "ת" and not (self._quote or self._span)

    @property
    def _is_deep(self) -> bool:
        """Whether text is indented code if it begins here."""
        blanks = self._lead.expandtabs(4)[: _MAX_INDENT + 1]
        return self._may_indent and len(blanks) > _MAX_INDENT and blanks.isspace()

    @property
    def _ends_quote(self) -> bool:
        """Whether text that begins here ends the quote in which the fence stands."""
        return self._in_quote and ">" not in self._lead

    def feed(self, text: str) -> None:
        """Take more text, not empty."""
        if not self.is_settled or _SIGN.search(text) is not None:
            for part in _PART.findall(text):
                (self._take_raw if self._raw else self._take)(part)
                self.last = part
        else:
            self.last = text

    def _take(self, part: str) -> None:
        if part[0] not in "\n`~":
            self._take_text(part)
        elif part == "\n":
            self._end_line()
        else:
            if self._run[:1] != part[0]:
                self._end_run()
            self._run = (self._run + part)[:_MAX_RUN]
            self._tag = None

    def _take_text(self, part: str) -> None:
        """Take text within a line, or a mark."""
        if self._run:
            self._end_run()
        if self._quote in _APOSTROPHES and not self._holds_call:
            self._take_behind_apostrophe(part)
        if self._closes or self._is_info:
            self._closes = self._closes and part.isspace()
            self._is_info = self._is_info and _INFO.fullmatch(part) is not None
        if part in ("<", "\\"):
            self._tag, self._tag_begins = part, self._is_blank
        elif self._tag is not None:
            self._take_tag(self._tag + part)
        if len(part) == 1 and part in _MARKS and not self._raw:
            self._mark(part)
        if self._is_blank:
            self._take_lead(self._lead + part)

    def _take_behind_apostrophe(self, part: str) -> None:
        """Take what stands behind a mark: it opened no quotation if a sentence ends, or if it stands for letters."""
        if len(self._behind) < _MAX_ELIDED:
            self._behind += part
        if _ELIDED.match(self._behind) is not None or _SENTENCE.search(self.last[-1:] + part) is not None:
            self._quote = ""

    def _take_lead(self, text: str) -> None:
        """Take the beginning of a line."""
        self._lead = _MAY_LEAD.match(text)[0][:_MAX_LEAD]  # type: ignore[index]  # it matches nothing, too
        if self._lead != text:
            self._begin_text()

    def _begin_text(self) -> None:
        """The line's marks of quotes and lists are over."""
        self._is_blank = False
        self._has_text = True
        if self._in_quote and self._ends_quote:
            self._fence, self._in_quote = "", False
            self.passage += 1
        if self._may_indent:
            self._is_code = not self._fence and self._is_deep
            self.passage += not (self._fence or self._is_code)

    def _end_line(self) -> None:
        self._end_run()
        if self._is_blank and self._lead.strip():
            self._begin_text()
        is_empty, fence = self._is_blank, self._fence
        if self._is_info and self._span >= 3:
            self._opens = "`" * self._span
        if self._closes or self._opens or (is_empty and self._in_quote):
            self._fence, self._in_quote = self._opens, ">" in self._lead
        self._may_indent = self._has_text if is_empty else self._is_code
        if self._span or self._quote:
            self._holds_call = not is_empty and (self._holds_call or (self._opens_last and not self._fence))
        else:
            self._holds_call = False
        if self._element and not (self._is_kept and (self._element in _BLOCKS or not is_empty)):
            self._element = ""
        if not ((fence and self._fence) or self._element or self._is_code):
            self.passage += 1
        self._new_line()

    @property
    def _opens_last(self) -> bool:
        """Whether the line ends in backticks or a mark that open: what they hold stands in the next lines."""
        opens_code = bool(self._span) and self._is_info and self.last[-1:] == "`"
        return opens_code or (bool(self._quote) and _CLOSING.get(self.last) == self._quote)

    def _take_tag(self, text: str) -> None:
        """Take what stands from `<` or a backslash on: a tag for code opens or closes it."""
        self._tag = text if _MAY_TAG.fullmatch(text) else None
        if self._tag is not None:
            return
        found = _TAG.match(text)
        if found is None:
            if (raw := _OPENS_RAW.match(text)) is not None:
                closing = raw["verb"] or (f"\\end{{{raw['block']}}}" if raw["block"] else "-->")
                self._open_raw(closing, raw["verb"] is None, self._tag_begins)
                if self._raw and raw.end() < len(text):
                    self._take_raw(text[raw.end() :])
        elif found[1]:
            self._element = "" if found[2].lower() == self._element else self._element
        elif not (self._element or self._span or self._opens or self._fence):
            self._element, self._is_kept = found[2].lower(), self._tag_begins

    def _open_raw(self, closing: str, is_block: bool, begins: bool) -> None:
        """Begin text that is printed as it stands, up to what closes it, or the end of a line that has other text."""
        if not (self._element or self._span or self._opens or self._fence):
            self._raw, self._raw_end, self._quote = closing, "", ""
            self._is_fresh, self._is_kept = is_block, is_block and begins

    def _take_raw(self, part: str) -> None:
        """Take more of it, a part of the text."""
        if self._is_prime:
            self._is_prime = False
            if _PRIME.match(part) is not None:
                self._raw = ""
                self._take(part)
                return
        text = self._raw_end + part
        at = text.find(self._raw)
        if at >= 0:
            rest, self.last = text[at + len(self._raw) :], self._raw
            self._raw = ""
            if rest:
                self._take(rest)
        elif part == "\n" and not (self._is_kept or self._is_fresh):
            self._left_raw, self._raw = self._raw, ""
            self._end_line()
        else:
            self._is_kept = self._is_kept or part == "\n"
            self._is_fresh = self._is_fresh and part.isspace()
            self._raw_end = text[-_MAX_CLOSING:]

    def _mark(self, mark: str) -> None:
        """Take a quotation mark."""
        if self._attribute and (mark == self._attribute or mark not in self._quote):
            self._attribute = "" if mark == self._attribute else self._attribute
        elif self._quote and mark in self._quote:
            if self.last[-1:] == "=" or self._opens_within(mark):
                self._attribute = mark
            else:
                self._quote, self._is_doubled, self._inert = "", mark == self.last, ""
                self.passage += not self._fence
        elif self._quote:
            return
        elif self._is_doubled and mark == self.last and mark in "\"'":
            self._take_three(3 * mark, self._mark_begins)
        elif mark in self._left and self._closes_left(mark):
            self._left = self._inert = ""
        elif mark in _OPENERS or not self._is_inert(mark):
            self._left = ""
            self._quote, self._is_doubled, self._mark_begins = _CLOSING.get(mark, ""), False, self._is_blank
            self._behind = ""
        elif _PREFIX.fullmatch(self._inert) is not None:
            self._take_three(3 * mark, False)
            self._is_prime = bool(self._raw) and mark == "'"

    def _take_three(self, marks: str, begins: bool) -> None:
        """Take three marks: they close such a text of an earlier line, or open one."""
        if self._left_raw == marks:
            self._left_raw, self._is_doubled = "", False
        else:
            self._open_raw(marks, True, begins)

    def _closes_left(self, mark: str) -> bool:
        """Whether a mark that may close what an earlier line opened does so, and opens nothing itself."""
        before = self.last[-1:]
        return mark not in _STRAIGHT or not (before.isspace() or before in _BEFORE_QUOTED)

    def _is_inert(self, mark: str) -> bool:
        """Whether a mark opens nothing: it stands behind a word, or behind such a mark, as for inches."""
        if self._inert and self.last == mark == self._inert[-1]:
            self._inert += mark
        elif _BEHIND_WORD.match(self.last[-1:] + mark) is not None:
            self._inert = self.last[-1:] + mark
        else:
            self._inert = ""
        return bool(self._inert)

    def _opens_within(self, mark: str) -> bool:
        """Whether a straight mark that may close the quotation opens another within, as none does before a call."""
        is_other = len(self._quote) > 1 and mark == self._quote[-1]
        may_open = is_other or (self._holds_call and mark in "\"'")
        return may_open and _BEHIND_WORD.match(self.last[-1:] + mark) is None

    def _end_run(self) -> None:
        """A run of backticks or tildes is over: it opens or closes code, or is text."""
        run, self._run = self._run, ""
        if not run:
            return
        begins = self._is_blank and (_QUOTE if self._fence else _LEAD).fullmatch(self._lead) is not None
        if self._is_blank:
            self._begin_text()
        self._is_info = False
        if self._fence:
            self._closes = begins and run.startswith(self._fence)
        elif self._is_code or self._element or (self._quote and self._holds_call):
            return  # in code, it is a part of it
        elif begins and len(run) >= 3 and not self._span:
            self._opens = run
        elif run[0] == "`":
            if self._opens[:1] == "`":
                self._span, self._opens = len(self._opens), ""
            self._is_info = not self._span
            self._span = 0 if self._span == len(run) else self._span or len(run)
            self.passage += not self._span


def ends_sentence(text: str, before: bool) -> bool:
    """Whether a text ends with a sentence, marks and blanks behind it aside; `before`: what it goes on from did."""
    said = text.rstrip(_BEHIND_STOP)
    return said[-1] in STOPS if said else before
