r"""HyperCLOVA X SEED Think's format: messages whose role says what they are. Read by the parsers `hyperclova`.

```
/think
The user asks for the weather.<|im_end|>
<|im_start|>assistant -> tool/function_call
[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|im_end|><|stop|>
```

The prompt ends with `<|im_start|>assistant`, so the output begins inside a role; a line break ends it. Any other role
is text, as where a model leaves it out.

Defined by the `chat_template` of naver-hyperclovax/HyperCLOVAX-SEED-Think-14B.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.output import FormatSpec, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of, optional, sequence, text
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.layout import ReplyPhase
from dovetail_parsers.messages import Header, Mark, MessagesParser
from dovetail_parsers.reasoning.declared import Declared
from dovetail_parsers.tools.sections import Written, WrittenCalls

START, END = "<|im_start|>", "<|im_end|>"
ROLE, THINKING, CALLS = "assistant", "/think", " -> tool/function_call"
MARKS: Mapping[str, Mark] = {
    START: Mark.START,
    "\n": Mark.BODY,
    **dict.fromkeys((END, "<|endofturn|>", "<|stop|>"), Mark.END),
}
_ROLES = {"": ReplyPhase.OUT, THINKING: ReplyPhase.IN, CALLS: ReplyPhase.TOOL}
"""By what stands behind the model's own."""


class HyperClovaParser(MessagesParser):
    """The `OutputParser` of HyperCLOVA."""

    marks = MARKS

    def read(self, header: str, written: str, marker: str) -> Header:
        """Say what a message is."""
        phase = _ROLES.get(header.removeprefix(START).removeprefix(ROLE))
        tools = self._spec.tools
        if phase is ReplyPhase.TOOL and tools is not None:
            return Header(phase, body=tools.body)
        if phase is None or phase is ReplyPhase.TOOL:
            return Header(ReplyPhase.OUT, stray=written + marker)
        return Header(phase)

    def explains(self, header: str, written: str) -> bool:
        """Whether a header is the beginning of a role."""
        said = header.removeprefix(START)
        return any((ROLE + role).startswith(said) or role.startswith(said) for role in _ROLES)

    def _take(self, role: enum.Enum, marker: str) -> bool:
        if role is Mark.BODY and self._between:
            return True  # a line break between two messages
        return super()._take(role, marker)


class HyperClovaReasoning(Declared):
    """`hyperclova`: HyperCLOVA X SEED Think; the template may force thinking, or skip it, behind the role."""

    form = FormatSpec(machine=HyperClovaParser)


THOUGHT = {
    "type": "tag",
    "begin": f"{THINKING}\n",
    "content": {"type": "any_text", "excludes": [END]},
    "end": f"{END}\n{START}{ROLE}",
}


class HyperClovaTools(WrittenCalls):
    r"""`hyperclova`: tool calls of HyperCLOVA X SEED Think.

    ```
     -> tool/function_call
    [{"name": "get_weather", "arguments": {"city": "Paris"}}]<|im_end|><|stop|>
    ```

    Calls as a list in a message of its own. Brings its machine also where no reasoning parser does.

    Defined by the `chat_template` of naver-hyperclovax/HyperCLOVAX-SEED-Think-14B.
    """

    trigger, around, between = CALLS, (f"{CALLS}\n[", "]"), ", "
    preamble, answer = optional(THOUGHT), sequence(text("\n"), {"type": "any_text"})

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say that calls are looked for; the machine knows where."""
        return replace(spec, machine=HyperClovaParser, tools=ToolFormat(CALLS, END, body=JsonCalls, before_start=""))

    def call(self, tool: Tool) -> Written:
        """An object in the list, the name first; thinking may stand before it."""
        return f'{{"name": "{name_of(tool)}", "arguments": ', json_arguments(tool), "}"
