r"""`kimi-k3`: Kimi-K3.

```
<|open|>think<|sep|>Paris is the capital.<|close|>think<|sep|>
<|open|>response<|sep|>It is Paris.<|close|>response<|sep|>
```
(without the line break).

The template appends the first marker. A marker is several tokens, of which `<|open|>`, `<|close|>` and `<|sep|>` are
special. The answer stands between markers too.

Defined by the `chat_template` of moonshotai/Kimi-K3.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers
from dovetail_parsers.reasoning.between import Between


class KimiK3(Between):
    """Thinking and answer in elements."""

    markers = Markers(
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", "", "", "", ended_by_tools=True, ended_by_answer=True
    )
    answer = Markers("<|open|>response<|sep|>", "<|close|>response<|sep|>", "", "", "")
    dropped = ("<|close|>message<|sep|>", "<|end_of_msg|>")
