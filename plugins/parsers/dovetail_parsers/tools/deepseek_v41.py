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

# ruff: noqa: RUF001, RUF002 - the markers are written with full-width bars

from __future__ import annotations

from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.tools.deepseek_v32 import DeepSeekV32, read_key


class DeepSeekV41(DeepSeekV32):
    """Calls as DSML tags with spaces."""

    section = ("<｜DSML｜ calls>", "</｜DSML｜ calls>")
    tags = Tags(
        call=('<｜DSML｜ invoke name="', '">'),
        call_end="</｜DSML｜ invoke>",
        key=('<｜DSML｜ parameter name="', ">"),
        value_end="</｜DSML｜ parameter>",
        read_key=read_key,
    )
