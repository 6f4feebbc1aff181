"""Formats of calls as Python: a class each, with a sample and its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.output import NewCall, ToolBody
from dovetail.sdk.formats.call_grammar import Node, Tool, name_of
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail_parsers.families.pythonic_calls import PythonicCalls, keyword_arguments
from dovetail_parsers.tools.either import Either
from dovetail_parsers.tools.sections import Section, Written

TEXT = r"[ \t\r\n]*([^\[ \t\r\n](.|\n)*)?"
"""An answer that is no list."""


class PythonicTools(Section):
    r"""`pythonic`: Llama 4, Llama 3.2 in its pythonic style, ToolACE and others.

    ```
    [get_weather(city="Paris", days=3), get_time()]
    ```

    The whole answer is a list of calls, or it stands between `<|python_start|>` and `<|python_end|>`. Arguments are
    Python literals, which become JSON; each reaches the client when it is complete. A list that is no list of calls is
    content.

    Defined by Meta's model cards of Llama 4 (tool calling) and the model card of Team-ACE/ToolACE-2-8B.
    """

    start, end, bare = "<|python_start|>", "<|python_end|>", "["
    trigger, around, between = "[", ("[", "]"), ", "
    answer: ClassVar[Node] = {"type": "regex", "pattern": TEXT}

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read Python calls."""
        return PythonicCalls(new_call, tools)

    def call(self, tool: Tool) -> Written:
        """A call with keywords. With `auto`, an answer that begins with a bracket is a list of such calls."""
        return f"{name_of(tool)}(", keyword_arguments(tool), ")"


class Olmo3Tools(Section):
    r"""`olmo3`: Olmo 3.

    ```
    <function_calls>
    get_weather(city="Paris", days=3)
    now()
    </function_calls>
    ```

    Python calls on lines of their own, between markers.

    Defined by the `chat_template` of allenai/Olmo-3-7B-Instruct.
    """

    start, end = "<function_calls>", "</function_calls>"
    before = "\n"
    trigger, around, between = start, (f"{start}\n", f"\n{end}"), "\n"

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read Python calls."""
        return PythonicCalls(new_call, tools)

    def call(self, tool: Tool) -> Written:
        """A call with keywords, on a line of its own."""
        return f"{name_of(tool)}(", keyword_arguments(tool), ")"


class Lfm2Tools(Section):
    r"""`lfm2`: LFM2 and LFM2.5.

    ```
    <|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>
    ```

    A list of Python calls between markers; a model that is asked to writes JSON there.

    Defined by the model card of LiquidAI/LFM2-1.2B (tool use).
    """

    start, end = "<|tool_call_start|>", "<|tool_call_end|>"
    trigger, around, between = start, (f"{start}[", f"]{end}"), ", "

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read Python calls, or JSON where the list holds objects."""
        return Either("{", lambda: JsonCalls(new_call, tools=tools), lambda: PythonicCalls(new_call, tools))

    def call(self, tool: Tool) -> Written:
        """A call with keywords, in a list."""
        return f"{name_of(tool)}(", keyword_arguments(tool), ")"
