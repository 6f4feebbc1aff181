r"""`deepseek-v31`: DeepSeek-V3.1.

```
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
<｜tool▁call▁end｜><｜tool▁calls▁end｜>
```
(without the line break). One section holds all calls.

Defined by the `chat_template` of deepseek-ai/DeepSeek-V3.1.
"""

# ruff: noqa: RUF002 - the markers are written with full-width bars

from __future__ import annotations

import re

from dovetail_parsers.tools.deepseek import SEPARATOR, DeepSeekCalls


class DeepSeekV31(DeepSeekCalls):
    """Calls as name and JSON between DeepSeek's markers."""

    head = re.compile(r"\s*([\w.:/\-]+)\s*")
    stop = SEPARATOR
    written = ("", SEPARATOR, "", "")
    is_fenced = False
