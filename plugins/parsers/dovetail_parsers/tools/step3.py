r"""`step3`: Step3.

```
<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">
<steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>
```
(without the line break). One section holds all calls.

Defined by the `chat_template` of stepfun-ai/step3.
"""

# ruff: noqa: RUF001, RUF002 - the markers are written with full-width bars

from __future__ import annotations

from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.tools.sections import TagSection


class Step3(TagSection):
    """Calls as steptml tags between markers."""

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
