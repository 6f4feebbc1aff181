r"""Harmony, the format of gpt-oss: messages with headers on channels. Read by the parsers `gpt-oss`.

```
<|channel|>analysis<|message|>The user asks for the weather.<|end|>
<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
```
(without the line break). The prompt ends with `<|start|>assistant`, so the output begins inside a header.

| header | its message is |
|---|---|
| `to=functions.NAME`, on any channel | a tool call |
| `to=` anything else, such as `browser.search` | a call of that name |
| channel `analysis` | reasoning |
| channel `final`, `commentary` or anything else | content |

A header is read for what it says, wherever it says it: the recipient may stand before or behind the channel, the
`<|constrain|>` may be missing, markers may be repeated. Text in a header that is none of the format's words is content,
with a message behind it or without.

Defined by the openai/harmony repository, `docs/format.md`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from dovetail.contracts.reasoning import ContentDelta, FormatSpec, Messages, ReasoningDelta, State
from dovetail.contracts.tools import Malformed, ToolArgs, ToolEnd
from dovetail.text.layout import Layout, Phase, make_layout
from dovetail.text.machine import Machine, new_call_id
from dovetail.text.tokenizer import Tokenizer

MAX_HEADER = 512
"""Characters of the longest header; longer text is content."""

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"analysis|commentary|final")
_PART = re.compile(r"(<\|[a-z]+\|>)?((?:(?!<\|[a-z]+\|>).)+)", re.DOTALL)
_NAMED = ("<|channel|>", "<|constrain|>")
_ROLES = ("user", "system", "developer", "tool")
_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code", "to=")


class Mark(enum.Enum):
    """The format's tokens."""

    START = "<|start|>"
    CHANNEL = "<|channel|>"
    CONSTRAIN = "<|constrain|>"
    MESSAGE = "<|message|>"
    END = "<|end|>"
    RETURN = "<|return|>"
    CALL = "<|call|>"


_ENDS = (Mark.END, Mark.RETURN, Mark.CALL)
_LAST_CHANNEL = r"(?s:(?>\bto=[^\s<]+|.)*?%s(?>\bto=[^\s<]+|(?!analysis|commentary|final).)*\Z)"
"""Matches a header whose last channel is the one named, whatever recipients say."""

MESSAGES = Messages(
    start=Mark.START.value,
    role="assistant",
    parts=(Mark.CHANNEL.value,),
    inner=(Mark.CONSTRAIN.value,),
    body=Mark.MESSAGE.value,
    ends=tuple(mark.value for mark in _ENDS),
    thinking="<|channel|>analysis",
    answer="<|channel|>final",
    thinks=rf"\A{_LAST_CHANNEL % 'analysis'}",
    answers=rf"\A(?!{_LAST_CHANNEL % 'commentary'})",
)
"""For the engine: which messages are thinking, where no calls are looked for."""
MESSAGES_AND_CALLS = replace(MESSAGES, thinks=rf"\A(?!(?s:.*\bto=[^\s<])){_LAST_CHANNEL % 'analysis'}")
"""A message with a recipient is a call, on any channel."""


class HarmonyParser(Machine):
    """The `OutputParser` of harmony. Phases: OPEN in a header or between messages, then by what the message is."""

    def __init__(
        self,
        spec: FormatSpec,
        tokenizer: Tokenizer | None = None,
        *,
        skip_special_tokens: bool = True,
        keep_markers: bool = False,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        """Prepare; arguments as for `FormatParser`. Calls are read as calls if `spec` has a tool format."""
        added: Mapping[str, int] = {} if tokenizer is None else tokenizer.added_tokens
        super().__init__(
            _layout(tuple((mark.value, added[mark.value]) for mark in Mark if mark.value in added)),
            tokenizer,
            phase=Phase.OPEN,
            skip_special_tokens=skip_special_tokens,
            keep_markers=keep_markers,
            make_id=make_id,
        )
        self._reads_calls = spec.tools is not None
        self._header = ""
        """What stands in the header, markers included; `_written` is the model's own part of it."""
        self._written = ""
        self._between = False
        self._call: int | None = None
        self._has_arguments = False

    @property
    def pending_content(self) -> str:
        """Content that is held back only because it may turn out to be part of a marker."""
        return self._held if self._phase is Phase.OUT else ""

    def prime(self, prompt_tail: str) -> State:
        """Take what the template appended: the beginning of a header, or of a message."""
        self._prime(prompt_tail)
        self._written = ""
        if self._call is not None:
            self._phase, self._call = Phase.OUT, None
        self._num_calls = 0
        return {Phase.IN: State.IN, Phase.OPEN: State.OPEN}.get(self._phase, State.OUT)

    def _finish(self, *, cut: bool) -> None:
        if self._phase is Phase.TOOL:
            self._end_call(complete=not cut)
        elif self._phase is Phase.OPEN:
            self._end_header()

    def _take(self, role: enum.Enum, marker: str, *, spelled: bool) -> bool:
        """Act on a marker. False: it is literal text here."""
        if self._phase is not Phase.OPEN:
            if role in (Mark.MESSAGE, Mark.CONSTRAIN):
                return False
            self._end_message(marker if role in _ENDS else "")
        if role in _ENDS:
            self._end_header()
            self._between = True
        elif role is Mark.MESSAGE:
            self._begin_message(marker)
        else:
            if role is Mark.START:
                self._end_header()
            self._between = False
            self._add(marker)
            if len(self._header) > MAX_HEADER:
                self._give_up("")
        return True

    def _sink(self, text: str) -> None:
        if self._phase is Phase.OPEN:
            self._sink_header(text)
        elif self._phase is Phase.IN:
            self._text(ReasoningDelta, text)
        elif self._call is not None:
            self._has_arguments = True
            self._event(ToolArgs(self._call, text))
        else:
            self._text(ContentDelta, text)

    def _sink_header(self, text: str) -> None:
        """Take text outside of messages. Between messages only whitespace belongs there."""
        if self._between:
            if text.isspace():
                return
            self._between = False
            self._header = self._written = ""
            self._phase = Phase.OUT
            self._text(ContentDelta, text.lstrip())
            return
        room = MAX_HEADER - len(self._header)
        self._add(text[: room + 1])
        if len(text) > room:
            self._give_up(text[room + 1 :])

    def _give_up(self, text: str) -> None:
        """A header is too long to be one: it is content, and so is the text behind it."""
        written, self._header, self._written = self._written, "", ""
        self._phase = Phase.OUT
        self._text(ContentDelta, written + text)

    def _add(self, text: str) -> None:
        self._header += text
        self._written += text

    def _begin_message(self, marker: str) -> None:
        header, written = self._header, self._written
        self._header = self._written = ""
        self._between = False
        if (stray := _stray(written)) and not self._priming:
            self._event(Malformed("header", stray))
        recipient = _RECIPIENT.search(header)
        channels = _CHANNEL.findall(_RECIPIENT.sub("", header))
        if recipient and self._reads_calls and not self._priming:
            self._phase = Phase.TOOL
            self._begin_call(recipient[1])
        elif channels and channels[-1] == "analysis":
            self._phase = Phase.IN
            self._trim(written + marker)
        else:
            self._phase = Phase.OUT

    def _begin_call(self, recipient: str) -> None:
        start = self._new_call(recipient.removeprefix("functions.") or recipient)
        self._call, self._has_arguments = start.index, False
        self._event(start)

    def _end_message(self, marker: str) -> None:
        if self._phase is Phase.IN:
            self._trim(marker)
        elif self._phase is Phase.TOOL:
            self._end_call(complete=True)
        self._phase = Phase.OPEN

    def _end_call(self, *, complete: bool) -> None:
        if self._call is None:
            return
        if complete and not self._has_arguments:
            self._event(ToolArgs(self._call, "{}"))
        self._event(ToolEnd(self._call))
        self._call = None

    def _end_header(self) -> None:
        """A header ends without its message: what is none of the format's words is content."""
        written, self._header, self._written = self._written, "", ""
        words = re.sub(r"<\|[a-z]+\|>", " ", written).split()
        explained = "<|" in written and all(word.startswith(("to=", *_WORDS)) or _begins(word) for word in words)
        if words and not explained:
            self._event(Malformed("header", written))

    def _trim(self, text: str) -> None:
        """Drop a header or an end marker of reasoning, unless reasoning is given out as written."""
        if self._keep_markers and text:
            self._text(ReasoningDelta, text)


def _stray(header: str) -> str:
    """Return the parts of a header that are none: neither its words, nor one name behind a marker."""
    found = []
    for part in _PART.finditer(header):
        words = [word for word in part[2].split() if not word.startswith(("to=", "functions.", *_ROLES, *_WORDS))]
        if len(words) > (part[1] in _NAMED):
            found.append(part[2])
    return "".join(found)


def _begins(text: str) -> bool:
    """Whether a word of the format begins with `text`: the output may end inside a header."""
    return any(word.startswith(text) for word in _WORDS)


@lru_cache(maxsize=16)
def _layout(token_ids: tuple[tuple[str, int], ...]) -> Layout:
    """Every marker counts everywhere."""
    markers: dict[str, enum.Enum] = {mark.value: mark for mark in Mark}
    return make_layout(dict.fromkeys(Phase, markers), token_ids)
