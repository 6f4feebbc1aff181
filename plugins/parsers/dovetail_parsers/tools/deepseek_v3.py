r"""`deepseek-v3`: DeepSeek-V3, V3-0324 and R1-0528.

```
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>…<｜tool▁call▁end｜><｜tool▁calls▁end｜>
```

One section holds all calls. Between name and arguments stands a fence; models leave out the type
or the fence at times.

Defined by the `chat_template` of deepseek-ai/DeepSeek-R1-0528 and DeepSeek-V3-0324.
"""

# ruff: noqa: RUF002 - the markers are written with full-width bars

from __future__ import annotations

import re

from dovetail_parsers.tools.deepseek import SEPARATOR, DeepSeekCalls


class DeepSeekV3(DeepSeekCalls):
    """Calls with fenced JSON between DeepSeek's markers."""

    head = re.compile(rf"(?:\s*\w*\s*{SEPARATOR})?\s*([\w.:/\-]+)[\s`]*")
    stop = "```json"
    written = (f"function{SEPARATOR}", "\n```json\n", "\n```", "\n")
    is_fenced = True
