r"""`gemma4`: Gemma 4.

```
<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
```

One call per section. Keys have no quotes, strings stand between `<|"|>`, other values are as in JSON.

Defined by the `chat_template` of google/gemma-4-31B-it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.output import NewCall, ToolBody
from dovetail.sdk.formats.call_grammar import Tool, name_of
from dovetail_parsers.families.brace_calls import BraceCalls, brace_arguments
from dovetail_parsers.tools.sections import Section, Written


class Gemma4Tools(Section):
    """Calls as a name and braces between markers."""

    start, end = "<|tool_call>", "<tool_call|>"
    quote = '<|"|>'
    inner: ClassVar[tuple[str, ...]] = ('<|"|>',)
    trigger = start

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read braces."""
        return BraceCalls(new_call, tools, quote=self.quote)

    def call(self, tool: Tool) -> Written:
        """As the template writes it."""
        return f"{self.start}call:{name_of(tool)}{{", brace_arguments(tool, self.quote, self.end), f"}}{self.end}"


class FunctionGemmaTools(Gemma4Tools):
    r"""`functiongemma`: FunctionGemma.

    ```
    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>
    ```

    As `gemma4`, with other markers.

    Defined by the `chat_template` of google/functiongemma-270m-it.
    """

    start, end = "<start_function_call>", "<end_function_call>"
    trigger = start
    quote = "<escape>"
    inner = ("<escape>",)
