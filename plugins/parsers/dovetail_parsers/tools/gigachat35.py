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

# ruff: noqa: RUF001, RUF002 - the markers are written with full-width bars

from __future__ import annotations

from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.tools.deepseek_v32 import DeepSeekV32, read_key


class GigaChat35(DeepSeekV32):
    """Calls as GCML tags."""

    word = "｜GCML｜"
    section = ("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>")
    tags = Tags(
        call=('<｜GCML｜invoke name="', '">'),
        call_end="</｜GCML｜invoke>",
        key=('<｜GCML｜parameter name="', ">"),
        value_end="</｜GCML｜parameter>",
        read_key=read_key,
    )
