r"""`mistral`: Mistral and Magistral models, both ways in which they write calls.

```
[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}
```

Tokenizers up to version 7 write a JSON list, in which an id may stand behind the arguments (it is not used: the call
has been announced by then). Later ones write a head and repeat `[TOOL_CALLS]` for each call; the id may be missing.

Defined by mistral-common, `tokens/tokenizers/instruct.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, NewCall, TemplateView, ToolBody, ToolEvent, ToolFormat
from dovetail.contracts.tools import ToolParser
from dovetail.text.json_calls import JsonCalls
from dovetail.text.tool_calls.call_grammar import calls_grammar, json_arguments, name_of
from dovetail.text.tool_calls.headed_calls import Head, HeadedCalls

_HEAD = re.compile(r"\s*([\w.:/\-]+?)(?:\[CALL_ID\]([\w\-]*))?\s*")


def read_head(text: str) -> Head | None:
    """Read `NAME[CALL_ID]ID`; the id may be missing."""
    found = _HEAD.fullmatch(text)
    return None if found is None else (found[1], found[2] or None)


class MistralCalls(ToolBody):
    """Looks at the first character and reads a section in the one way or the other."""

    def __init__(self, new_call: NewCall) -> None:
        self._new_call = new_call
        self._space: list[str] = []
        self._body: ToolBody | None = None

    def feed(self, text: str) -> list[ToolEvent]:
        """Take more text."""
        if self._body is None:
            self._space.append(text)
            if text.isspace():
                return []
            text = "".join(self._space)
            self._body = (
                JsonCalls(self._new_call)
                if text.lstrip()[0] in "[{"
                else HeadedCalls(self._new_call, read_head=read_head, stops=("[ARGS]",))
            )
        return self._body.feed(text)

    def close(self) -> list[ToolEvent]:
        """End the section."""
        return [] if self._body is None else self._body.close()

    def cut(self) -> list[ToolEvent]:
        """End the section, cut short."""
        return [] if self._body is None else self._body.cut()

    @property
    def inside_value(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self._body is not None and self._body.inside_value


class Mistral(ToolParser):
    """Calls behind `[TOOL_CALLS]`."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""
        tools_format = ToolFormat("[TOOL_CALLS]", "", body=MistralCalls, before_start="", inner=("[ARGS]", "[CALL_ID]"))
        return replace(spec, tools=tools_format)

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Calls in the later way, without ids."""
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (f"[TOOL_CALLS]{name_of(tool)}[ARGS]", json_arguments(tool), ""),
            trigger="[TOOL_CALLS]",
        )

    def detect(self, template: TemplateView) -> float:
        """The marker."""
        return 0.95 if "[TOOL_CALLS]" in template.source else 0.0
