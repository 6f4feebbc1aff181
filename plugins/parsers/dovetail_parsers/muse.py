r"""The format of Muse Spark and Muse Glimmer: messages with recipients, and calls as tags. Read by the parsers `muse`.

```
 to=self<|message|>The user asks for the weather.<|eom|><|start|>assistant to=get_weather<|message|>
<atem:function_calls>
<atem:invoke name="get_weather">
<atem:parameter name="city">Paris</atem:parameter>
</atem:invoke>
</atem:function_calls><|eot|>
```
(without the first line break). The prompt ends with `<|start|>assistant`, so the output begins inside a header.

| recipient | its message is |
|---|---|
| `self` | reasoning |
| `user`, `commentary` | content |
| `developer` | reasoning: it is not for the user |
| none | content; reasoning in Muse Spark |
| any other | tool calls, named by their own tags |

A model may leave a message by a bare ` to=NAME<|message|>`. Tags outside of a call's message are text.

Defined by the `chat_template` of Muse Glimmer, and for recipients of Muse Spark by vLLM's documentation of its parser.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.contracts.output import FormatSpec, Messages, NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, name_of, tagged_arguments
from dovetail.sdk.formats.layout import ReplyPhase
from dovetail.sdk.formats.plain import Plain
from dovetail.sdk.formats.reply_grammar import answer_message, other_messages
from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.families.marker_filter import MarkerFilter
from dovetail_parsers.families.tagged_calls import TaggedCalls, before_attributes, key_before_attributes
from dovetail_parsers.messages import Header, Mark, MessagesParser
from dovetail_parsers.reasoning.declared import Declared
from dovetail_parsers.tools.sections import Written, WrittenCalls

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_TO = re.compile(r"to=[^\s<]*")
_HEADER = re.compile(r"\s*(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=[^\s<]*)?\s*")
_BEGINNINGS = {word[:size] for word in ("assistant", "to=") for size in range(1, len(word) + 1)}
_TAIL = re.compile(r"(?<=\s)(?:t|to|to=[^\s<]*)\Z")
_FIRST = r"\A(?s:(?!\bto=[^\s<]).)*"
"""What stands in a header before its recipient."""
_BEFORE = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
"""What may stand before a recipient."""
_MAX_TAIL = 256
_PHASES = {"self": ReplyPhase.IN, "developer": ReplyPhase.IN, "user": ReplyPhase.OUT, "commentary": ReplyPhase.OUT}

MARKS: Mapping[str, Mark] = {
    "<|start|>": Mark.START,
    "<|message|>": Mark.BODY,
    "<|eom|>": Mark.END,
    "<|eot|>": Mark.END,
}
MESSAGES = Messages(
    start="<|start|>",
    role="assistant",
    parts=(),
    body="<|message|>",
    ends=("<|eom|>", "<|eot|>"),
    thinking=" to=self",
    answer=" to=user",
    thinks=rf"{_FIRST}\bto=(?:self|developer)(?![^\s<])",
    answers=rf"{_FIRST}(?:\bto=user(?![^\s<])|\Z)",
    bare=r"(?:\A|(?<=\s))to=[^\s<]+",
)
SPARK = replace(
    MESSAGES, thinks=rf"{_FIRST}(?:\bto=(?:self|developer)(?![^\s<])|\Z)", answers=rf"{_FIRST}\bto=user(?![^\s<])"
)
"""As Muse Spark: a message to nobody is reasoning."""


TAGS = Tags(
    call=('<atem:invoke name="', '">'),
    call_end="</atem:invoke>",
    key=('<atem:parameter name="', '">'),
    value_end="</atem:parameter>",
    read_name=before_attributes,
    read_key=key_before_attributes,
)
AROUND = ("<atem:function_calls>", "</atem:function_calls>")
"""Stand around the calls of a message."""


class MuseParser(MessagesParser):
    """The `OutputParser` of Muse.

    Attributes:
        unaddressed: What a message without a recipient is.
    """

    marks = MARKS
    holds = _BEFORE + "t"
    unaddressed: ClassVar[ReplyPhase] = ReplyPhase.OUT
    _tail = ""
    """Text at the end of a message that may be the recipient of the next; `_last` is what stands before it."""
    _last = " "

    def read(self, header: str, written: str, marker: str) -> Header:
        """Say what a message is."""
        stray = "" if _HEADER.fullmatch(written) else written
        found = _RECIPIENT.search(header)
        if found is None:
            return Header(self.unaddressed, stray=stray)
        phase = _PHASES.get(found[1], ReplyPhase.TOOL)
        tools = self._spec.tools
        return Header(phase, body=None if tools is None else tools.body, stray=stray)

    def explains(self, header: str, written: str) -> bool:
        """Whether what was written is the beginning of a header and nothing else."""
        words = written.replace("<|start|>", " ").split()
        known = all(_is_recipient(word) or word in _BEGINNINGS for word in words)
        return known and ("<|start|>" in written or "to=" in written)

    @property
    def pending_content(self) -> str:
        """Content that is held back only because it may turn out to be a header, or part of a marker."""
        return self._tail + self._held if self._phase is ReplyPhase.OUT else ""

    def _find_passing(self) -> Plain | None:
        return None if self._tail or self._last.isspace() else super()._find_passing()

    def _sink(self, text: str) -> None:
        if self._phase is ReplyPhase.OPEN or self._priming:
            super()._sink(text)
            return
        if not self._tail and "t" not in text:
            self._last = text[-1:]
            super()._sink(text)
            return
        seen = self._last + self._tail + text
        found = _TAIL.search(seen, max(0, len(seen) - _MAX_TAIL))
        cut = len(seen) if found is None else found.start()
        text, self._tail = seen[len(self._last) : cut], seen[cut:]
        if text:
            self._last = text[-1]
            super()._sink(text)

    def _sink_header(self, text: str) -> None:
        self._last = " " if self._between else self._last
        super()._sink_header(text)

    def _begin_message(self, marker: str) -> None:
        self._last = " "
        super()._begin_message(marker)

    def _take(self, role: enum.Enum, marker: str) -> bool:
        """Act on a marker; a recipient in front of `<|message|>` is a header, with what came before it or without."""
        tail, self._tail = self._tail, ""
        if role is Mark.BODY and _RECIPIENT.fullmatch(tail) and not self._is_value(role):
            self._end_message("")
            self._add(tail)
        elif tail:
            super()._sink(tail)
        return super()._take(role, marker)

    def _finish(self, *, cut: bool) -> None:
        tail, self._tail = self._tail, ""
        if tail:
            super()._sink(tail)
        super()._finish(cut=cut)


class SparkParser(MuseParser):
    """As Muse Spark: a message to nobody is reasoning."""

    unaddressed = ReplyPhase.IN


def _is_recipient(word: str) -> bool:
    """Whether a word is a recipient, with the beginning of a marker behind it where the output was cut there."""
    found = _TO.match(word)
    return found is not None and any(mark.startswith(word[found.end() :]) for mark in MARKS)


class MuseReasoning(Declared):
    """`muse`: Muse Spark; a message to nobody is reasoning."""

    form = FormatSpec(machine=SparkParser, messages=SPARK)


class MuseGlimmerReasoning(Declared):
    """`muse-glimmer`: Muse Glimmer; a message to nobody is content."""

    form = FormatSpec(machine=MuseParser, messages=MESSAGES)


class MuseTools(WrittenCalls):
    r"""`muse`: tool calls of Muse Spark and Muse Glimmer.

    ```
     to=get_weather<|message|><atem:function_calls>
    <atem:invoke name="get_weather">
    <atem:parameter name="city">Paris</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eot|>
    ```

    Calls as tags in messages to a tool. Brings its machine also where no reasoning parser does.

    Defined by the `chat_template` of Muse Glimmer.
    """

    trigger, between = " to=", MESSAGES.ends[0] + MESSAGES.start + MESSAGES.role
    preamble, answer = other_messages(MESSAGES), answer_message(MESSAGES, {"type": "any_text"})

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say that calls are looked for; the machine knows where."""

        def body(new_call: NewCall) -> ToolBody:
            return MarkerFilter(TaggedCalls(new_call, TAGS, tools), AROUND)

        return replace(
            spec,
            machine=spec.machine or MuseParser,
            messages=spec.messages or MESSAGES,
            tools=ToolFormat(AROUND[0], AROUND[1], body=body, before_start=""),
        )

    def call(self, tool: Tool) -> Written:
        """A message with a recipient, behind thinking as the model likes."""
        header = f' to={name_of(tool)}<|message|>{AROUND[0]}\n<atem:invoke name="{name_of(tool)}">\n'
        return header, tagged_arguments(tool, TAGS, section_end=AROUND[1]), f"</atem:invoke>\n{AROUND[1]}"
