r"""`minicpm5`: MiniCPM5.

```
<function name="get_weather"><param name="city">Paris</param></function>
```

Calls stand one after the other, without a section. A value may be wrapped in CDATA. Models leave out the space in a
tag at times.

Defined by the `chat_template` of openbmb/MiniCPM5-1B.
"""

from __future__ import annotations

from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.tools.sections import TagSection


class MiniCpm5(TagSection):
    """Calls as tags without a section."""

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
