"""Formats of calls as tags: a class each, with a sample and its source."""

# ruff: noqa: RUF001, RUF002 - some markers are written with full-width bars

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.output import NewCall, TemplateView, ToolBody
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.families.tagged_calls import TaggedCalls
from dovetail_parsers.tools.either import Either
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


def unquoted(text: str) -> str:
    """Read a name with or without quotes."""
    return text.strip().strip("\"'")


class DotsTools(TagSection):
    r"""`dots`: dots.llm.

    ```
    <dots_function_call>
    <invoke name=get_weather>
    <parameter name=city>Paris</parameter>
    </invoke>
    </dots_function_call>
    ```

    One section holds all calls. Quotes around names are optional. Some replies have `{"name": …, "arguments": …}` in
    it.

    Defined by the `chat_template` of rednote-hilab/dots.llm2.
    """

    start, end = "<dots_function_call>", "</dots_function_call>"
    before = "\n"
    tags = Tags(
        call=("<invoke name=", ">"),
        call_end="</invoke>",
        key=("<parameter name=", ">"),
        value_end="</parameter>",
        read_name=unquoted,
        read_key=lambda text: (unquoted(text), None),
    )

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read tags, or JSON."""
        return Either("{", lambda: JsonCalls(new_call, tools=tools), lambda: TaggedCalls(new_call, self.tags, tools))


_NAME = re.compile(r'([^"]*)"?(?:\s+index="\d*")?\s*')
_KEY = re.compile(r'([^"]*)"?(?:\s+type="(\w*)")?\s*')


def read_name(text: str) -> str:
    """Read `get_weather" index="1"`."""
    found = _NAME.fullmatch(text)
    return found[1] if found else text


def read_key(text: str) -> tuple[str, bool | None]:
    """Read `city" type="string"`."""
    found = _KEY.fullmatch(text)
    return (text, None) if found is None else (found[1], None if not found[2] else found[2] == "string")


class KimiK3Tools(TagSection):
    r"""`kimi-k3`: Kimi-K3.

    ```
    <|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>
    ```
    (without the line breaks). One section holds all calls. `type` says whether a value is text or JSON.

    Defined by the `chat_template` of moonshotai/Kimi-K3.
    """

    start, end = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
    inner = ("<|open|>", "<|close|>", "<|sep|>")
    tags = Tags(
        call=('<|open|>call tool="', "<|sep|>"),
        call_end="<|close|>call<|sep|>",
        key=('<|open|>argument key="', "<|sep|>"),
        value_end="<|close|>argument<|sep|>",
        read_name=read_name,
        read_key=read_key,
    )
    lines = False

    def key(self, name: str, is_string: bool) -> str:
        """Write the key and its type."""
        return f'{name}" type="{"string" if is_string else "object"}"'

    def called(self, name: str) -> str:
        """Write the name and an index."""
        return f'{name}" index="1"'


_WORD = re.compile(r"<tool_calls(:\w+)>")


def tags_of(word: str) -> Tags:
    """Return the tags with their word."""
    return Tags(
        call=(f"<tool_call{word}>", f"<tool_sep{word}>"),
        call_end=f"</tool_call{word}>",
        key=(f"<arg_key{word}>", f"</arg_key{word}>"),
        value_start=f"<arg_value{word}>",
        value_end=f"</arg_value{word}>",
    )


class HunyuanTools(TagSection):
    r"""`hy-v3`: Hunyuan 3 and 4 (Hy3, Hy4).

    ```
    <tool_calls>
    <tool_call>get_weather<tool_sep>
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>
    </tool_calls>
    ```

    One section holds all calls. Every tag of a model may end in a word of its own, `<tool_calls:opensource>`: it is
    read off the template.

    Defined by the `chat_template` of tencent/Hy3.
    """

    start, end = "<tool_calls>", "</tool_calls>"
    tags: ClassVar[Tags] = tags_of("")

    def for_template(self, template: TemplateView) -> HunyuanTools:
        """Take the word from the template."""
        found = _WORD.search(template.source)
        word = found[1] if found else ""
        tags = tags_of(word)
        pieces = (*tags.call, tags.call_end, *tags.key, tags.value_start, tags.value_end)
        made = type(self).__name__
        facts = {"start": f"<tool_calls{word}>", "end": f"</tool_calls{word}>", "tags": tags, "inner": pieces}
        bound: type[HunyuanTools] = type(made, (type(self),), facts)
        return bound()


class MiniMaxM2Tools(TagSection):
    r"""`minimax-m2`: MiniMax-M2 and M2.1.

    ```
    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>
    ```

    One section holds all calls. Values are text; the tool's schema says which of them are not strings.

    Defined by the `chat_template` and `docs/tool_calling_guide.md` of MiniMaxAI/MiniMax-M2.
    """

    start, end = "<minimax:tool_call>", "</minimax:tool_call>"
    before = "\n"
    tags = Tags(
        call=('<invoke name="', '">'),
        call_end="</invoke>",
        key=('<parameter name="', '">'),
        value_end="</parameter>",
    )
    also = (tags.call[0],)
