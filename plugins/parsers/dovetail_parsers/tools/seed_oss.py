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

from __future__ import annotations

from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.tools.sections import TagSection


class SeedOss(TagSection):
    """Calls as tags between Seed's markers."""

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
