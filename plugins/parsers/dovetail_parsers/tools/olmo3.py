r"""`olmo3`: Olmo 3.

```
<function_calls>
get_weather(city="Paris", days=3)
now()
</function_calls>
```

Python calls on lines of their own, between markers.

Defined by the `chat_template` of allenai/Olmo-3-7B-Instruct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import NewCall, ToolBody
from dovetail.sdk.formats.call_grammar import calls_grammar, keyword_arguments, name_of
from dovetail_parsers.families.pythonic_calls import PythonicCalls
from dovetail_parsers.tools.sections import Section


class Olmo3Tools(Section):
    """Calls as lines of Python between markers."""

    start, end = "<function_calls>", "</function_calls>"
    before = "\n"

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read Python calls."""
        return PythonicCalls(new_call, tools)

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Calls with keywords, one a line."""
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (f"{name_of(tool)}(", keyword_arguments(tool), ")"),
            section=(f"{self.start}\n", f"\n{self.end}"),
            separator="\n",
            trigger=self.start,
        )
