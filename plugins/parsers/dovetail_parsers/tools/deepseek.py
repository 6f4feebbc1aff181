"""DeepSeek's formats with `<｜tool▁calls▁begin｜>`: one section of calls between markers."""

# ruff: noqa: RUF001, RUF002 - the markers are written with full-width bars

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of
from dovetail_parsers.families.headed_calls import Head, HeadedCalls
from dovetail_parsers.tools.sections import Written, WrittenCalls

SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekCalls(WrittenCalls):
    """Calls of a head and JSON.

    Attributes:
        head: Matches a call's head up to `stop`; its first group is the name.
        stop: Text between head and arguments.
        written: What the template writes before name, between name and arguments, and behind them.
        is_fenced: Whether the arguments stand in a fence, by which templates are told apart.
    """

    head: ClassVar[re.Pattern[str]]
    stop: ClassVar[str]
    written: ClassVar[tuple[str, str, str]]
    is_fenced: ClassVar[bool]
    trigger, around = SECTION[0], SECTION

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""
        inner = (CALL[0], SEPARATOR, CALL[1])

        def body(new_call: NewCall) -> ToolBody:
            return self._body(new_call, tools)

        return replace(spec, tools=ToolFormat(*SECTION, body=body, before_start="", also=(CALL[0],), inner=inner))

    def call(self, tool: Tool) -> Written:
        """As the template writes it, in one section."""
        before, between, behind = self.written
        return f"{CALL[0]}{before}{name_of(tool)}{between}", json_arguments(tool), f"{behind}{CALL[1]}"

    def _body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        return HeadedCalls(
            new_call,
            read_head=self._read_head,
            stops=(self.stop,),
            begin=CALL[0],
            end=CALL[1],
            is_fenced=self.is_fenced,
            tools=tools,
        )

    def _read_head(self, text: str) -> Head | None:
        found = self.head.fullmatch(text)
        return None if found is None else (found[1], None)


class DeepSeekV3Tools(DeepSeekCalls):
    r"""`deepseek-v3`: DeepSeek-V3, V3-0324 and R1-0528.

    ```
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>…<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    ```

    One section holds all calls. Between name and arguments stands a fence; models leave out the type or the fence
    at times.

    Defined by the `chat_template` of deepseek-ai/DeepSeek-R1-0528 and DeepSeek-V3-0324.
    """

    head = re.compile(rf"(?:\s*\w*\s*{SEPARATOR})?\s*([\w.:/\-]+)[\s`]*")
    stop = "```json"
    written, between = (f"function{SEPARATOR}", "\n```json\n", "\n```"), "\n"
    is_fenced = True


class DeepSeekV31Tools(DeepSeekCalls):
    r"""`deepseek-v31`: DeepSeek-V3.1.

    ```
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>
    ```
    (without the line break). One section holds all calls.

    Defined by the `chat_template` of deepseek-ai/DeepSeek-V3.1.
    """

    head = re.compile(r"\s*([\w.:/\-]+)\s*")
    stop = SEPARATOR
    written = ("", SEPARATOR, "")
    is_fenced = False
