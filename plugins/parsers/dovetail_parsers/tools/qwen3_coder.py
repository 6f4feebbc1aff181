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

Values are text; the tool's schema says which of them are not strings. One newline on either side of a value belongs to
the tags. Models leave `<tool_call>` out at times, and the closing tags.

Defined by the `chat_template` of Qwen/Qwen3-Coder-480B-A35B-Instruct.
"""

from __future__ import annotations

from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.tools.sections import TagSection


class Qwen3Coder(TagSection):
    """Calls as tags between `<tool_call>` and `</tool_call>`."""

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
