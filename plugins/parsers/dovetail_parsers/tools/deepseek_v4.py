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

# ruff: noqa: RUF001, RUF002 - the markers are written with full-width bars

from __future__ import annotations

from dovetail_parsers.tools.deepseek_v32 import DeepSeekV32


class DeepSeekV4(DeepSeekV32):
    """Calls as DSML tags in a section of tool calls."""

    section = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
