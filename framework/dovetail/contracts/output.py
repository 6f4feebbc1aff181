"""A model's output format as data, and the events that its text becomes: what parsers of both kinds declare and send.

A reasoning parser makes a `FormatSpec`, a tool-call parser adds a `ToolFormat` to it, and the core derives the machine
that reads the output. Importing this module imports neither torch nor a tokenizer.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec


class ToolStart(msgspec.Struct, frozen=True, gc=False):
    """A call begins: its name is known. `index` counts the calls of one reply from 0."""

    index: int
    id: str
    name: str


class ToolArgs(msgspec.Struct, frozen=True, gc=False):
    """More of the arguments' JSON text of call `index`. The pieces concatenate to what the client receives."""

    index: int
    json: str


class ToolEnd(msgspec.Struct, frozen=True, gc=False):
    """No more arguments come for call `index`. Sent once per `ToolStart`, also for a call that was cut short."""

    index: int


class Malformed(msgspec.Struct, frozen=True, gc=False):
    """Output that looked like part of the format and is not. It reaches the client as content, never lost.

    `kind` says what was expected (`tool_call`); `text` is what the model wrote, markers included.
    """

    kind: str
    text: str


ToolEvent = ToolStart | ToolArgs | ToolEnd | Malformed


class NewCall(Protocol):
    """Given to a `ToolBody`: numbers the calls of a reply and makes their ids."""

    def __call__(self, name: str, call_id: str | None = None) -> ToolStart:
        """Return the start event of the next call; `call_id` where the model wrote one itself."""
        ...


class ToolBody(ABC):
    """Reads the text between a tool section's markers. One instance per section, fed in order, any chunking.

    The same text gives the same concatenated result however it is cut; work per character is constant.
    """

    @abstractmethod
    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text. Emit argument text as soon as it is certain."""

    @abstractmethod
    def close(self) -> list[ToolEvent]:
        """The section's end marker was read, or the output ended. Nothing is fed afterwards.

        Text that no call explains goes out as `Malformed` (without the markers, which the caller adds).
        """

    def cut(self) -> list[ToolEvent]:
        """The output was cut short inside the section. Called in place of `close`; override it where they differ."""
        return self.close()

    left: tuple[str, str] | None = None
    """Of a section in doubt that is over: its text behind the last call, and what of the text fed was not read."""

    is_unended = False
    """Whether the section is closed without its end marker: the next one begins, or the output is over."""

    def doubt(self) -> None:
        """A text of `ToolFormat.also` opened the section, which may be one that the model only names.

        Called before `feed`. A call counts then only if its name is a tool's and it ends; nothing of it is given out
        before. Text that belongs to none ends the section: it stands in `left` rather than in a `Malformed`.
        """

    def doubt_names(self) -> None:
        """The section stands within a line, behind other text: a model may only name its markers.

        Called before `feed`. The first call counts then only if its name is a tool's; else it is `Malformed`.
        """

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a value, where a marker of the section is literal.

        One that closes the section is not if the next section or the end of the output follows it.
        """
        return False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    r"""Where tool calls stand in the output.

    Args:
        start: Marker that opens a section of one or more calls; empty where only `also` or `bare` do.
        end: Marker that closes it; empty where only the next section or the end of the output does.
        body: Makes the reader of a section; called with the `NewCall` of this reply.
        before_start: Newlines that the template puts before `start`; dropped from the end of the content.
        also: Texts that begin a call, for models that leave `start` out: they open a section in doubt (see
            `ToolBody.doubt`) where they begin a line, whether they are tokens or not.
        starts: Other texts that open a section as `start` does, and are part of it.
        bare: Characters that open a section, and are part of it, where an answer begins with one of them.
        inner: Markers inside a section that are tokens of the vocabulary: the body gets their text, also where
            special tokens give none.
    """

    start: str
    end: str
    body: Callable[[NewCall], ToolBody]
    before_start: str = "\n"
    also: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    bare: str = ""
    inner: tuple[str, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More reasoning text, from `num_tokens` tokens (0 where they were counted with an earlier delta)."""

    text: str
    num_tokens: int = 0


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the answer."""

    text: str


Event = ReasoningDelta | ContentDelta | ToolStart | ToolArgs | ToolEnd | Malformed


class State(enum.Enum):
    """Where a reply stands with respect to thinking."""

    OPEN = "open"
    """Not thinking; the model may begin to."""
    IN = "in"
    """Thinking."""
    OUT = "out"
    """Thinking is over; later markers of it are literal text."""


@dataclass(frozen=True, slots=True)
class Markers:
    r"""Where reasoning stands in the output.

    A marker that is one added token of the vocabulary is matched by that token only: spelled out in other tokens it
    is text. Any other marker is matched in the text, wherever tokens cut it.

    Args:
        start: Opens reasoning.
        end: Closes it.
        after_start: What the template writes between `start` and the reasoning. Of the text there, the longest part
            that agrees with it is dropped, so that history renders back to the same tokens.
        before_end: As `after_start`, between the reasoning and `end`: newlines.
        after_end: As `after_start`, between `end` and the answer.
        ended_by_tools: Whether a tool call's start marker, or a text that opens a section as well, ends reasoning that
            is not closed later.
        also: Other spellings of `start` and `end`, which the engine does not know.
        ended_by: Texts that end reasoning and are content, where calls are not looked for: what begins a call in the
            models' own format.
        ended_by_answer: Whether reasoning that was not closed is ended by the marker before an answer
            (`FormatSpec.answer`), and by those in `FormatSpec.dropped`.
        shown: Whether reasoning stays in the content, markers included; `start` is put before it where it stands in the
            prompt.
        ends_quoted: Whether `end`, and what else ends reasoning, does so also where the reasoning only quotes it. The
            server says so where the engine follows thinking, for a grammar or a budget.
    """

    start: str
    end: str
    after_start: str = "\n"
    before_end: str = "\n"
    after_end: str = "\n\n"
    ended_by_tools: bool = False
    also: tuple[tuple[str, str], ...] = ()
    ended_by: tuple[str, ...] = ()
    ended_by_answer: bool = False
    shown: bool = False
    ends_quoted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """How thinking is told apart in a reply of messages with headers, for a format with a machine of its own.

    The engine follows it token by token: a grammar holds for the answer's message, a budget for thinking's. Every
    marker is an added token of the vocabulary, or grammars and budgets are refused.

    Attributes:
        start: Begins a message, and its header.
        role: What the model's messages have behind `start`.
        parts: Markers that begin a part of a header, and a header without `start` where they stand in a message.
        inner: Markers that mean something in headers only.
        body: Ends the header.
        bodies: Other markers that do, in a format where that marker tells what a message is. They end a message that
            they stand in, and headers are searched with them at the end.
        ends: End a message; the first of them ends one that another follows.
        thinking: The header of thinking as the model writes it: what stands between `role` and `body`; with one of
            `bodies` at its end in place of `body`.
        answer: The same for the answer.
        thinks: Regular expression, found in each header of a message of thinking; headers are searched from `start` to
            before `body`, markers included.
        answers: Regular expression, found in each header of a message that is the answer, among those where `thinks`
            is not. All others are free text, such as a preamble.
        bare: Regular expression for text at the end of a message that is the header of the next where `body` follows,
            with nothing between them; empty: there is none.
    """

    start: str
    role: str
    parts: tuple[str, ...]
    inner: tuple[str, ...] = ()
    body: str
    bodies: tuple[str, ...] = ()
    ends: tuple[str, ...]
    thinking: str
    answer: str
    thinks: str
    answers: str
    bare: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """A model's output format.

    Attributes:
        reasoning: Where reasoning stands; None where the format has none.
        tools: Where tool calls stand; None where calls are not looked for.
        answer: What stands around an answer, for formats that mark it; dropped. Both markers may be missing.
        dropped: Markers that mean nothing outside of thinking and calls, such as those around a message.
        initial: The state for text that comes without a prompt to read it from.
        machine: For a format that markers around parts cannot describe (harmony): makes the machine that reads it,
            called as `dovetail.sdk.formats.output.FormatParser` is. None: the machine of the markers above.
        messages: Beside `machine`: what the engine must know of the format for grammars and thinking budgets. None:
            requests with either are refused.
    """

    reasoning: Markers | None = None
    tools: ToolFormat | None = None
    answer: Markers | None = None
    dropped: tuple[str, ...] = ()
    initial: State = State.OPEN
    machine: Callable[..., OutputParser] | None = None
    messages: Messages | None = None


class TokenizerView(Protocol):
    """What a parser may ask of the model's tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows, added tokens included."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Added tokens, special or not, and their ids."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; empty for an id outside the vocabulary."""
        ...


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A call in a sample reply."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SampleReply:
    """A reply for a template to write, as it stands in a history; None where it has no such part."""

    reasoning: str | None = None
    content: str | None = None
    calls: tuple[SampleCall, ...] = ()


@dataclass(frozen=True, slots=True)
class WrittenReply:
    """A sample reply as the template writes it behind the prompt for it.

    Attributes:
        whole: The conversation: a question, and the reply.
        output: What of it stands behind the prompt, or, where the template writes a history in another way (without the
            thinking that the prompt opens), behind what they share; None where they share nothing of the reply.
        tail: What the template appended to the prompt, as far as the reply follows it.
        appended: All that the template appended to the prompt.
    """

    whole: str
    output: str | None
    tail: str
    appended: str


class TemplateView(Protocol):
    """What a parser may ask of the model's chat template."""

    @property
    def source(self) -> str:
        """The template's text, empty if the model has none."""
        ...

    @property
    def response_template(self) -> Any:
        """What `response_template` of tokenizer_config.json says of replies: JSON of any form; None: nothing."""
        return None

    def __hash__(self) -> int:
        """A view is a key of caches: what was read off it stays the same."""
        return id(self)

    def written(self, reply: SampleReply, switches: Mapping[str, Any] | None = None) -> WrittenReply | None:
        """Write a reply behind a short question, with tools that fit its calls.

        The answer is kept: the same reply and switches are rendered once, unless many others were asked for since.
        `dovetail.sdk.formats.samples` has replies to ask for, and reads them back.

        Args:
            reply: What the assistant said.
            switches: `chat_template_kwargs`, JSON.

        Returns:
            None where the template refuses, fails, or writes the same otherwise each time.
        """
        return None


class OutputParser(Protocol):
    """Turns one choice's output into events. The same output gives the same folded result however it is cut."""

    reasoning_tokens: int
    """Tokens generated inside thinking so far, markers excluded."""

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as known."""
        ...

    def prime(self, prompt_tail: str) -> State:
        """Take what the template appended to the prompt; its output is discarded. Called once, before `feed`."""
        ...

    def feed(self, token_ids: Sequence[int], text: str | None = None) -> list[Event]:
        """Take new tokens, or, where there are no ids, text (pass no ids then)."""
        ...

    def finish(self, reason: str) -> list[Event]:
        """The output has ended: return what was held back."""
        ...
