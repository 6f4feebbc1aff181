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
with a message behind it or without. A call with `<|constrain|>xml` holds tags, as Beam writes them (see the parser
`beam`), any other one JSON.

Defined by the openai/harmony repository, `docs/format.md`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from dovetail.contracts.output import FormatSpec, Messages, NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of, tagged_arguments
from dovetail.sdk.formats.layout import ReplyPhase
from dovetail.sdk.formats.reply_grammar import answer_message, other_messages
from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.families.tagged_calls import TaggedCalls
from dovetail_parsers.messages import Header, Mark, MessagesParser
from dovetail_parsers.reasoning.declared import Declared
from dovetail_parsers.tools.sections import Written, WrittenCalls

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CUT_MARKER = re.compile(r"(\bto=[^\s<]+)<(?:\|[a-z]*\|?)?\Z")
_NAMED_FUNCTION = re.compile(r"functions\.[^\s<]*")
_CHANNEL = re.compile(r"analysis|commentary|final")
_PART = re.compile(r"(<\|[a-z]+\|>)?((?:(?!<\|[a-z]+\|>).)+)", re.DOTALL)
_NAME = re.compile(r"[a-z_\-]{1,32}")
_TOOL = re.compile(r"[\w.:/\-]+")
"""Names that calls of tags may have; under any other the text passes as written, as arguments."""
_NAMED = ("<|channel|>", "<|constrain|>")
_KNOWN = re.compile(r"(?:user|system|developer|tool|assistant|analysis|commentary|final|json|code|xml)+")
_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code", "xml", "to=")

MARKS: Mapping[str, Mark] = {
    "<|start|>": Mark.START,
    "<|channel|>": Mark.PART,
    "<|constrain|>": Mark.INNER,
    "<|message|>": Mark.BODY,
    "<|end|>": Mark.END,
    "<|return|>": Mark.END,
    "<|call|>": Mark.END,
}
_LAST_CHANNEL = r"(?s:(?>\bto=[^\s<]+|.)*?%s(?>\bto=[^\s<]+|(?!analysis|commentary|final).)*\Z)"
"""Matches a header whose last channel is the one named, whatever recipients say."""

MESSAGES = Messages(
    start="<|start|>",
    role="assistant",
    parts=("<|channel|>",),
    inner=("<|constrain|>",),
    body="<|message|>",
    ends=("<|end|>", "<|return|>", "<|call|>"),
    thinking="<|channel|>analysis",
    answer="<|channel|>final",
    thinks=rf"\A{_LAST_CHANNEL % 'analysis'}",
    answers=rf"\A(?!{_LAST_CHANNEL % 'commentary'})",
)
"""For the engine: which messages are thinking, where no calls are looked for."""
MESSAGES_AND_CALLS = replace(MESSAGES, thinks=rf"\A(?!(?s:.*\bto=[^\s<])){_LAST_CHANNEL % 'analysis'}")
"""A message with a recipient is a call, on any channel."""

TAGS = Tags(
    key=('<rfl:parameter name="', '">'),
    value_end="</rfl:parameter>",
    newlines=True,
)
"""How Beam writes arguments. Its end tag is a token that begins with the line break in front of it."""


@dataclass(frozen=True)
class Arguments:
    """The `ToolFormat.body` of harmony: its machine reads calls itself and asks for the tools alone."""

    tools: Sequence[Mapping[str, Any]]

    def __call__(self, new_call: NewCall) -> ToolBody:
        """Make a reader of a call alone, as for any other format."""
        return TaggedCalls(new_call, TAGS, self.tools)


class HarmonyParser(MessagesParser):
    """The `OutputParser` of harmony."""

    marks = MARKS
    inner: ClassVar[tuple[str, ...]] = ('<rfl:parameter name="', "\n</rfl:parameter>", "</rfl:parameter>")

    def read(self, header: str, written: str, marker: str) -> Header:
        """Say what a message is."""
        recipient = _RECIPIENT.search(header)
        begun = len(header) - len(written)
        is_continued = recipient is not None and recipient.start() < begun < recipient.end()
        stray = _stray(header[recipient.end() :] if recipient is not None and is_continued else written)
        channels = _CHANNEL.findall(_RECIPIENT.sub("", header))
        if recipient and self._reads_calls and not self._priming:
            name = recipient[1].removeprefix("functions.") or recipient[1]
            if "<|constrain|>xml" in header and _TOOL.fullmatch(name):
                return Header(ReplyPhase.TOOL, body=partial(self._tagged, name), stray=stray)
            return Header(ReplyPhase.TOOL, name, stray=stray)
        return Header(ReplyPhase.IN if channels and channels[-1] == "analysis" else ReplyPhase.OUT, stray=stray)

    def _tagged(self, name: str, new_call: NewCall) -> ToolBody:
        """Make the reader of a call's tags."""
        made = None if self._spec.tools is None else self._spec.tools.body
        return TaggedCalls(new_call, TAGS, made.tools if isinstance(made, Arguments) else (), name=name)

    def explains(self, header: str, written: str) -> bool:
        """Whether what was written holds a marker, and nothing else but the format's words."""
        words = re.sub(r"<\|[a-z]+\|>", " ", _CUT_MARKER.sub(r"\1", written)).split()
        return "<|" in written and all(_is_word(word) or _begins(word) for word in words)


def _stray(header: str) -> str:
    """Return the parts of a header that are none: no recipient, none of its words, nor one name behind a marker."""
    found = []
    for part in _PART.finditer(header):
        words = [word for word in part[2].split() if not _is_word(word)]
        is_name = part[1] in _NAMED and len(words) == 1 and _NAME.fullmatch(words[0]) is not None
        if words and not is_name:
            found.append(_RECIPIENT.sub("", part[2]))
    return "".join(found)


def _is_word(text: str) -> bool:
    """Whether a word is one of the format's, or several without a space."""
    if text.startswith("to="):
        text = _RECIPIENT.sub("", text, count=1).removeprefix("to=")
    return not text or _NAMED_FUNCTION.fullmatch(text) is not None or _KNOWN.fullmatch(text) is not None


def _begins(text: str) -> bool:
    """Whether a word of the format begins with `text`: the output may end inside a header."""
    return any(word.startswith(text) for word in _WORDS)


class GptOssReasoning(Declared):
    """`gpt-oss`: gpt-oss-20b, gpt-oss-120b and others that write harmony; reasoning is the channel `analysis`."""

    form = FormatSpec(machine=HarmonyParser, messages=MESSAGES)


class GptOssTools(WrittenCalls):
    r"""`gpt-oss`: tool calls of gpt-oss and others that write harmony.

    ```
    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    ```

    A call is a message with a recipient, on any channel. Its text reaches the client as the model wrote it.

    Calls as harmony's messages with a recipient. Brings its machine also where no reasoning parser does.

    Defined by the openai/harmony repository, `docs/format.md`.
    """

    trigger, is_parallel = "<|channel|>commentary to=functions.", False
    preamble = other_messages(MESSAGES_AND_CALLS, "<|channel|>commentary")
    answer = answer_message(MESSAGES_AND_CALLS, {"type": "any_text"})

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say that calls are looked for; the machine knows how."""
        return replace(
            spec,
            machine=HarmonyParser,
            messages=MESSAGES_AND_CALLS,
            tools=ToolFormat("<|channel|>", "<|call|>", body=Arguments(tools)),
        )

    def call(self, tool: Tool) -> Written:
        """A message on the channel of commentary, behind thinking and preambles; its `<|call|>` ends the reply."""
        header = f"<|channel|>commentary to=functions.{name_of(tool)} <|constrain|>json<|message|>"
        return header, json_arguments(tool), "<|call|>"


class BeamTools(GptOssTools):
    r"""`beam`: Beam. Harmony's messages, with tags in its calls.

    ```
     to=get_weather<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="city">
    Paris
    </rfl:parameter><|call|>
    ```

    Calls as harmony's messages with a recipient, their arguments as tags.

    Defined by the response template of Beam's checkpoints, as SGLang's `parser/beam.py` has it.
    """

    trigger, is_parallel = " to=", True
    between = MESSAGES_AND_CALLS.ends[0] + MESSAGES_AND_CALLS.start + MESSAGES_AND_CALLS.role
    preamble = other_messages(MESSAGES_AND_CALLS)

    def call(self, tool: Tool) -> Written:
        """A message with a recipient, behind thinking as the model likes."""
        header = f" to={name_of(tool)}<|channel|>analysis <|constrain|>xml<|message|>"
        return header, tagged_arguments(tool, TAGS, behind_value=""), ""
