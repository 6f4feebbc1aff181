r"""Functionary's format: messages behind `>>>`, each to a recipient. Read by the parsers `functionary`.

```
all
Let me look.>>>get_weather
{"city": "Paris"}
```

The prompt ends with `>>>`. What is sent to `all` is content, to a tool its arguments. Behind `>>>` stands `all` or the
name of a tool that was offered, and a line break; else it is text, as in a listing of Python. So it is in code.

Defined by the `chat_template` of meetkai/functionary-medium-v3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.contracts.output import FormatSpec, NewCall, ToolBody
from dovetail.sdk.formats.layout import ReplyPhase
from dovetail_parsers.families.headed_calls import Head, HeadedCalls
from dovetail_parsers.messages import Header, Mark, MessagesParser
from dovetail_parsers.reasoning.declared import Declared

MARKS: Mapping[str, Mark] = {">>>": Mark.START, "\n": Mark.BODY}
ALL = "all"


@dataclass(frozen=True)
class FunctionNames:
    """The `ToolFormat.body` of Functionary: its machine reads calls itself and asks for the tools' names alone."""

    names: frozenset[str]

    def __call__(self, new_call: NewCall) -> ToolBody:
        """Make a reader of a call alone, as for any other format."""
        return HeadedCalls(new_call, read_head=self._head, stops=("\n",), begin=">>>")

    def _head(self, head: str) -> Head | None:
        return (head.strip(), None) if head.strip() in self.names else None


class FunctionaryParser(MessagesParser):
    """The `OutputParser` of Functionary."""

    marks = MARKS
    is_spelled = True

    def read(self, header: str, written: str, marker: str) -> Header:
        """Say what a message is."""
        name = header.removeprefix(">>>")
        if name == ALL:
            return Header(ReplyPhase.OUT)
        if name in self._names:
            return Header(ReplyPhase.TOOL, name)
        return Header(ReplyPhase.OUT, stray=written + marker)

    def explains(self, header: str, written: str) -> bool:
        """Whether a header is the beginning of a recipient."""
        name = header.removeprefix(">>>")
        return any(known.startswith(name) for known in (ALL, *self._names))

    @property
    def _names(self) -> frozenset[str]:
        body = None if self._spec.tools is None else self._spec.tools.body
        return body.names if isinstance(body, FunctionNames) else frozenset()


class FunctionaryReasoning(Declared):
    """`functionary`: models that do not think; what is sent to `all` is the answer, also of requests without tools."""

    form = FormatSpec(machine=FunctionaryParser)
