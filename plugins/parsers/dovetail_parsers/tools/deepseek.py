"""DeepSeek's formats with `<｜tool▁calls▁begin｜>`: one section of calls between markers."""

# ruff: noqa: RUF001, RUF002 - the markers are written with full-width bars

from __future__ import annotations

import re
from typing import ClassVar

from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of
from dovetail_parsers.tools.headed_sections import HeadedSection
from dovetail_parsers.tools.sections import Written

SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekCalls(HeadedSection):
    """Calls of a head and JSON.

    Attributes:
        written: What the template writes before name, between name and arguments, and behind them.
    """

    written: ClassVar[tuple[str, str, str]]
    start, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    marks = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    also, inner = (marks[0],), (marks[0], SEPARATOR, marks[1])
    trigger, around = start, (start, end)

    def call(self, tool: Tool) -> Written:
        """As the template writes it, in one section."""
        before, between, behind = self.written
        return f"{self.marks[0]}{before}{name_of(tool)}{between}", json_arguments(tool), f"{behind}{self.marks[1]}"


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

    head = re.compile(rf"(?:\s*\w*\s*{SEPARATOR})?\s*(?P<name>[\w.:/\-]+)[\s`]*")
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

    head = re.compile(r"\s*(?P<name>[\w.:/\-]+)\s*")
    stop = SEPARATOR
    written = ("", SEPARATOR, "")
