"""What the author of a tool-call parser implements: `ToolParser`, and the events of a tool call.

Importing this module imports neither torch nor a tokenizer. A parser for a format whose calls are JSON objects
between two markers needs no code of its own:

```python
class Acme(ToolParser):
    def extend(self, spec, tools):
        return replace(spec, tools=ToolFormat("<call>", "</call>", body=JsonCalls))
```

with `JsonCalls` from `dovetail.text.json_calls`. Another shape brings its own `ToolBody`. The class is named in the
entry-point group `dovetail.tool_parsers.v1`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dovetail.contracts.options import Configurable

if TYPE_CHECKING:
    from dovetail.contracts.grammar import GrammarSpec
    from dovetail.contracts.reasoning import FormatSpec, TemplateView


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
        also: Texts that open a section as well and are part of it, for models that leave `start` out.
        bare: Characters that open a section, and are part of it, where an answer begins with one of them.
        inner: Markers inside a section that are tokens of the vocabulary: the body gets their text, also where
            special tokens give none.
    """

    start: str
    end: str
    body: Callable[[NewCall], ToolBody]
    before_start: str = "\n"
    also: tuple[str, ...] = ()
    bare: str = ""
    inner: tuple[str, ...] = ()


class ToolParser(Configurable, ABC):
    """One tool-call format. Made once per process without arguments; keeps no per-request state."""

    @abstractmethod
    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add this format to what the reasoning parser declared.

        Args:
            spec: The reasoning parser's, or an empty one. Return a copy (`dataclasses.replace`).
            tools: The request's tools as OpenAI writes them: `{"type": "function", "function": {...}}`.
        """

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Describe the calls that `tool_choice` allows, in the model's own format, or None: not constrained.

        Beside a `FormatSpec.machine` it describes the whole reply, thinking included; else what follows the thinking.
        """
        return None

    def detect(self, template: TemplateView) -> float:
        """Say how surely a model with this template writes this format, 0 to 1; for `--tool-call-parser auto`."""
        return 0.0

    def for_template(self, template: TemplateView) -> ToolParser:
        """Return the parser for a model with this template: itself, unless it depends on it. Called once."""
        return self
