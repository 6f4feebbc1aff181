r"""`granite`: Granite 3.2 and 3.3.

```
Here is my thought process: Paris is the capital. Here is my response: It is Paris.
```

Both markers are sentences of plain text; `Here's` stands for `Here is` at times.

Defined by the model card of ibm-granite/granite-3.2-8b-instruct.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers
from dovetail_parsers.reasoning.between import Between


class Granite(Between):
    """Thinking between two sentences."""

    markers = Markers(
        "Here is my thought process:",
        "Here is my response:",
        after_start="\n",
        before_end="\n\n",
        after_end="\n",
        ended_by_tools=True,
        also=(("Here's my thought process:", "Here's my response:"),),
    )
