r"""`iquest-q1`: IQuest Q1.

```
<iquest_tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></iquest_tool_call>
```

As `glm45`, with other markers around a call.

Defined by the description of the format in SGLang's `function_call/iquest_q1_detector.py`.
"""

from __future__ import annotations

from typing import ClassVar

from dovetail_parsers.tools.glm45 import Glm45


class IQuestQ1(Glm45):
    """Calls as a name, keys and values between IQuest's markers."""

    markers: ClassVar[tuple[str, str]] = ("<iquest_tool_call>", "</iquest_tool_call>")
    lines: ClassVar[bool] = False
