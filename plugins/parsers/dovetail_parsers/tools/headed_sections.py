"""Formats of calls as a head with the name, and JSON, between markers: a class each, with a sample and its source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from dovetail.contracts.output import NewCall, ToolBody
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of, sequence, text
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail_parsers.families.headed_calls import Head, HeadedCalls
from dovetail_parsers.tools.either import Either
from dovetail_parsers.tools.sections import Section, Written


class HeadedSection(Section):
    """Calls as a head and JSON between markers.

    Attributes:
        head: Matches a call's head; its group `name` is the name, its group `id`, where it has one, the id.
        stop: Text between head and arguments.
        marks: Before and behind a call.
        is_fenced: Whether the arguments stand in a fence, by which templates are told apart.
    """

    head: ClassVar[re.Pattern[str]]
    stop: ClassVar[str]
    marks: ClassVar[tuple[str, str]] = ("", "")
    is_fenced: ClassVar[bool] = False

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read heads and JSON."""
        return HeadedCalls(
            new_call,
            read_head=self.read_head,
            stops=(self.stop,),
            begin=self.marks[0],
            end=self.marks[1],
            is_fenced=self.is_fenced,
            tools=tools,
        )

    def read_head(self, given: str) -> Head | None:
        """Read name and id off a head; None: it is none."""
        found = self.head.fullmatch(given)
        return None if found is None else (found["name"], found.groupdict().get("id") or None)


class KimiK2Tools(HeadedSection):
    r"""`kimi-k2`: Kimi-K2-Instruct and Kimi-K2-Thinking.

    ```
    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>
    ```
    (without the line break). One section holds all calls. The head is the call's id, which reaches the client as
    written, since the template puts it before the tool's result.

    Defined by `docs/tool_call_guidance.md` of moonshotai/Kimi-K2-Instruct.
    """

    start, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    marks, stop = ("<|tool_call_begin|>", "<|tool_call_end|>"), "<|tool_call_argument_begin|>"
    head = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.:/\-]+?)(?::\d+)?)\s*")
    also, inner = (marks[0],), (marks[0], stop, marks[1])
    trigger, around = start, (start, end)

    def call(self, tool: Tool) -> Written:
        """As the template writes it, in one section, with an index in its id."""
        index = {"type": "regex", "pattern": "[0-9]{1,4}"}
        arguments = sequence(index, text(self.stop), json_arguments(tool))
        return f"{self.marks[0]}functions.{name_of(tool)}:", arguments, self.marks[1]


class MistralTools(HeadedSection):
    r"""`mistral`: Mistral and Magistral models, both ways in which they write calls.

    ```
    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}
    ```

    Tokenizers up to version 7 write a JSON list, in which an id may stand behind the arguments (it is not used: the
    call has been announced by then). Later ones write a head and repeat `[TOOL_CALLS]` for each call; the id may be
    missing.

    Defined by mistral-common, `tokens/tokenizers/instruct.py`.
    """

    start = trigger = "[TOOL_CALLS]"
    stop = "[ARGS]"
    head = re.compile(r"\s*(?P<name>[\w.:/\-]+?)(?:\[CALL_ID\](?P<id>[\w\-]*))?\s*")
    inner = (stop, "[CALL_ID]")

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read a JSON list, or calls with heads."""
        headed = partial(super().body, new_call, tools)
        return Either("[{", partial(JsonCalls, new_call, tools=tools), headed, skipped=" \t\r\n")

    def call(self, tool: Tool) -> Written:
        """A call in the later way, without an id."""
        return f"{self.start}{name_of(tool)}{self.stop}", json_arguments(tool), ""


def _mark(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"


class Plamo3Tools(HeadedSection):
    r"""`plamo3`: PLaMo 3.

    ```
    <|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>
    <|plamo:begin_tool_name:plamo|>get_weather<|plamo:end_tool_name:plamo|>
    <|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"city": "Paris"}
    <|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>
    ```
    (without the line breaks). One section holds all calls. Each marker is several tokens.

    Defined by the description of the format in vLLM's `parser/plamo3.py`.
    """

    start, end = _mark("begin_tool_requests"), _mark("end_tool_requests")
    marks, stop = (_mark("begin_tool_request"), _mark("end_tool_request")), "<|plamo:msg|>"
    name_marks, ended = (_mark("begin_tool_name"), _mark("end_tool_name")), _mark("end_tool_arguments")
    arguments = f"{_mark('begin_tool_arguments')}<|plamo:constrain|>json{stop}"
    head = re.compile(
        rf"\s*{re.escape(name_marks[0])}\s*(?P<name>[\w.:/\-]+)\s*(?:{re.escape(name_marks[1])})?\s*"
        rf"(?:{re.escape(_mark('begin_tool_arguments'))})?\s*(?:<\|plamo:constrain\|>)?\s*(?:json)?\s*"
    )
    also, inner = (marks[0],), (*marks, *name_marks, arguments, ended)
    ignored = (ended,)
    trigger, around = start, (start, end)

    def call(self, tool: Tool) -> Written:
        """As the template writes it."""
        header = f"{self.marks[0]}{self.name_marks[0]}{name_of(tool)}{self.name_marks[1]}{self.arguments}"
        return header, json_arguments(tool), self.ended + self.marks[1]


class SolarTools(HeadedSection):
    r"""`solar`: Solar Open.

    ```
    <|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris"}
    <|tool_call:end|><|calls|>
    ```
    (without the line break). One section holds all calls; their ids reach the client.

    Defined by the `chat_template` of upstage/Solar-Open-100B.
    """

    start, end = "<|tool_calls|>", "<|calls|>"
    marks, stop = ("<|tool_call:begin|>", "<|tool_call:end|>"), "<|tool_call:args|>"
    head = re.compile(r"\s*(?P<id>[\w\-]*)\s*<\|tool_call:name\|>\s*(?P<name>[\w.:/\-]+)\s*")
    also, inner = (marks[0],), (marks[0], "<|tool_call:name|>", stop, marks[1])
    trigger, around = start, (start, end)

    def call(self, tool: Tool) -> Written:
        """As the template writes it, with an id."""
        number = {"type": "regex", "pattern": "[a-z0-9]{1,24}"}
        name = text(f"<|tool_call:name|>{name_of(tool)}{self.stop}")
        return self.marks[0], sequence(number, name, json_arguments(tool)), self.marks[1]
