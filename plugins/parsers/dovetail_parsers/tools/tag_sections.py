"""Formats of calls as tags: a class each, with a sample and its source."""

# ruff: noqa: RUF001, RUF002 - some markers are written with full-width bars

from __future__ import annotations

from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.tools.sections import TagSection


class MiniCpm5Tools(TagSection):
    r"""`minicpm5`: MiniCPM5.

    ```
    <function name="get_weather"><param name="city">Paris</param></function>
    ```

    Calls stand one after the other, without a section. A value may be wrapped in CDATA. Models leave out the space
    in a tag at times.

    Defined by the `chat_template` of openbmb/MiniCPM5-1B.
    """

    before = "\n"
    also = ('<function name="', '<functionname="')
    tags = Tags(
        call=('<function name="', '">'),
        call_end="</function>",
        key=('<param name="', '">'),
        value_end="</param>",
        spelled=(('<functionname="', '<function name="'), ('<paramname="', '<param name="')),
        cdata=True,
    )
    lines = False


class Qwen3CoderTools(TagSection):
    r"""`qwen3-coder`: Qwen3-Coder, Qwen3.5 and others with the same tags, such as Nemotron 3 and Step-3.5.

    ```
    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>
    ```

    Values are text; the tool's schema says which of them are not strings. One newline on either side of a value
    belongs to the tags. Models leave `<tool_call>` out at times, and the closing tags.

    Defined by the `chat_template` of Qwen/Qwen3-Coder-480B-A35B-Instruct.
    """

    start, end = "<tool_call>", "</tool_call>"
    before = "\n"
    also = ("<function=",)
    shared = False
    tags = Tags(
        call=("<function=", ">"),
        call_end="</function>",
        key=("<parameter=", ">"),
        value_end="</parameter>",
        newlines=True,
    )


class SeedOssTools(TagSection):
    r"""`seed-oss`: Seed-OSS.

    ```
    <seed:tool_call>
    <function=get_weather>
    <parameter=city>Paris</parameter>
    </function>
    </seed:tool_call>
    ```

    One call per section. Values are text; the tool's schema says which of them are not strings.

    Defined by the `chat_template` of ByteDance-Seed/Seed-OSS-36B-Instruct.
    """

    start, end = "<seed:tool_call>", "</seed:tool_call>"
    before = "\n"
    also = ("<function=",)
    shared = False
    tags = Tags(
        call=("<function=", ">"),
        call_end="</function>",
        key=("<parameter=", ">"),
        value_end="</parameter>",
    )


class Step3Tools(TagSection):
    r"""`step3`: Step3.

    ```
    <｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">
    <steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>
    ```
    (without the line break). One section holds all calls.

    Defined by the `chat_template` of stepfun-ai/step3.
    """

    start, end = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
    also = ('<steptml:invoke name="', "<｜tool_call_begin｜>")
    inner = ("<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>")
    ignored = ("<｜tool_call_begin｜>", "function<｜tool_sep｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>")
    tags = Tags(
        call=('<steptml:invoke name="', '">'),
        call_end="</steptml:invoke>",
        key=('<steptml:parameter name="', '">'),
        value_end="</steptml:parameter>",
    )
    lines = False
