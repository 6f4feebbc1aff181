r"""`deepseek-v32`: DeepSeek-V3.2.

```
<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
```

Each tag is several tokens, of which `｜DSML｜` is one of its own. `string` says whether a value is text or JSON.

Defined by `encoding/encoding_dsv32.py` of deepseek-ai/DeepSeek-V3.2.
"""

# ruff: noqa: RUF001, RUF002 - the markers are written with full-width bars

from __future__ import annotations

import re
from typing import ClassVar

from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.tools.sections import TagSection

_KEY = re.compile(r"(.*?)\"(?:\s+string=\"(true|false)\")?\s*", re.DOTALL)


def read_key(text: str) -> tuple[str, bool | None]:
    """Read `city" string="true"`."""
    found = _KEY.fullmatch(text)
    if found is None:
        return text.strip().strip('"'), None
    return found[1], None if found[2] is None else found[2] == "true"


TAGS = Tags(
    call=('<｜DSML｜invoke name="', '">'),
    call_end="</｜DSML｜invoke>",
    key=('<｜DSML｜parameter name="', ">"),
    value_end="</｜DSML｜parameter>",
    read_key=read_key,
)


class DeepSeekV32Tools(TagSection):
    """Calls as DSML tags.

    Attributes:
        section: Around all calls.
        word: Stands in every tag, a token of its own.
    """

    section: ClassVar[tuple[str, str]] = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    word: ClassVar[str] = "｜DSML｜"
    before = "\n\n"
    tags = TAGS

    def __init_subclass__(cls) -> None:
        """Take the markers from what the subclass declares."""
        cls.start, cls.end = cls.section
        cls.also, cls.inner = (cls.tags.call[0],), (cls.word,)

    start, end = section
    also, inner = (TAGS.call[0],), (word,)

    def key(self, name: str, is_string: bool) -> str:
        """Write the key and whether its value is text."""
        return f'{name}" string="{"true" if is_string else "false"}"'


class DeepSeekV4Tools(DeepSeekV32Tools):
    r"""`deepseek-v4`: DeepSeek-V4 and V4-Flash.

    ```
    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>
    ```

    As `deepseek-v32`, with another word for the section.

    Defined by the `chat_template` of deepseek-ai/DeepSeek-V4-Flash.
    """

    section = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")


class DeepSeekV41Tools(DeepSeekV32Tools):
    r"""`deepseek-v41`: DeepSeek-V4.1.

    ```
    <｜DSML｜ calls>
    <｜DSML｜ invoke name="get_weather">
    <｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>
    ```

    As `deepseek-v32`, with a space in the tags and another word for the section.

    Defined by the encoding of deepseek-ai/DeepSeek-V4.1-Flash.
    """

    section = ("<｜DSML｜ calls>", "</｜DSML｜ calls>")
    tags = Tags(
        call=('<｜DSML｜ invoke name="', '">'),
        call_end="</｜DSML｜ invoke>",
        key=('<｜DSML｜ parameter name="', ">"),
        value_end="</｜DSML｜ parameter>",
        read_key=read_key,
    )


class GigaChat35Tools(DeepSeekV32Tools):
    r"""`gigachat35`: GigaChat 3.5.

    ```
    <｜GCML｜tool_calls>
    <｜GCML｜invoke name="get_weather">
    <｜GCML｜parameter name="city" string="true">Paris</｜GCML｜parameter>
    </｜GCML｜invoke>
    </｜GCML｜tool_calls>
    ```

    As `deepseek-v4`, with a word of its own in the tags.

    Defined by the `chat_template` of ai-sage/GigaChat3.5.
    """

    word = "｜GCML｜"
    section = ("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>")
    tags = Tags(
        call=('<｜GCML｜invoke name="', '">'),
        call_end="</｜GCML｜invoke>",
        key=('<｜GCML｜parameter name="', ">"),
        value_end="</｜GCML｜parameter>",
        read_key=read_key,
    )
