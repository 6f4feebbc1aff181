"""What the author of a reasoning parser implements: `ReasoningParser`, and what an output parser is.

Importing this module imports neither torch nor a tokenizer. A parser declares where the format's markers stand; the
core derives the incremental machine from the declaration:

```python
class AcmeR2(ReasoningParser):
    def spec(self, tokenizer, template, request):
        return FormatSpec(reasoning=Markers("<r>", "</r>"))
```

The class is named in the entry-point group `dovetail.reasoning_parsers.v1`. Whether the model starts inside thinking
is never declared: it is read from what the chat template appended to the prompt.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from dovetail.contracts.options import Configurable
from dovetail.contracts.tools import Malformed, ToolArgs, ToolEnd, ToolFormat, ToolStart


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
            was not closed.
        also: Other spellings of `start` and `end`, which the engine does not know.
        ended_by: Texts that end reasoning and are content, where calls are not looked for: what begins a call in the
            models' own format.
        ended_by_answer: Whether reasoning that was not closed is ended by the marker before an answer
            (`FormatSpec.answer`), and by those in `FormatSpec.dropped`.
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
            called as `dovetail.text.parsing.output.FormatParser` is. None: the machine of the markers above.
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


class TemplateView(Protocol):
    """What a parser may ask of the model's chat template."""

    @property
    def source(self) -> str:
        """The template's text, empty if the model has none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserRequest:
    """What a parser may know of the request. New fields arrive with defaults."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs` as sent."""


class ReasoningParser(Configurable, ABC):
    """One reasoning format. Made once per process without arguments; keeps no per-request state."""

    @abstractmethod
    def spec(self, tokenizer: TokenizerView, template: TemplateView, request: ParserRequest) -> FormatSpec:
        """Declare the format for one request."""

    def detect(self, template: TemplateView) -> float:
        """Say how surely a model with this template writes this format, 0 to 1; for `--reasoning-parser auto`."""
        return 0.0

    def for_template(self, template: TemplateView) -> ReasoningParser:
        """Return the parser for a model with this template: itself, unless it depends on it. Called once."""
        return self


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
        """The output is over: give out what was held back."""
        ...
