r"""`cohere-command4`: Cohere Command 4.

```
<|START_THINKING|>Paris is the capital.<|END_THINKING|><|START_TEXT|>It is Paris.<|END_TEXT|>
```

As `cohere-command3`, with other markers around the answer.

Defined by the `chat_template` of the model.
"""

from __future__ import annotations

from dovetail.contracts.output import Markers
from dovetail_parsers.reasoning.between import Between
from dovetail_parsers.reasoning.cohere_command import THINKING


class CohereCommand4(Between):
    """Thinking and answer between markers."""

    markers = THINKING
    answer = Markers("<|START_TEXT|>", "<|END_TEXT|>", "", "", "")
