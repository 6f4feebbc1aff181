r"""`functiongemma`: FunctionGemma.

```
<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>
```

As `gemma4`, with other markers.

Defined by the `chat_template` of google/functiongemma-270m-it.
"""

from __future__ import annotations

from dovetail_parsers.tools.gemma4 import Gemma4


class FunctionGemma(Gemma4):
    """Calls as a name and braces between FunctionGemma's markers."""

    start, end = "<start_function_call>", "<end_function_call>"
    quote = "<escape>"
    inner = ("<escape>",)
