r"""`hermes`: Nous Hermes, Qwen2.5, Qwen3 and others trained on the Hermes format.

```
Let me look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
<tool_call>
{"name": "get_weather", "arguments": {"city": "Rome"}}
</tool_call>
```

One JSON object per section; the template puts a newline before each start marker and inside the markers. The text of
`arguments` reaches the client as the model wrote it, while it is written.

Defined by the `tool_use` chat template in the tokenizer_config.json of NousResearch/Hermes-2-Pro-Llama-3-8B, and by
that of Qwen/Qwen2.5-7B-Instruct.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, ToolFormat
from dovetail.contracts.tools import ToolParser
from dovetail.sdk.formats.call_grammar import calls_grammar, json_arguments, name_of
from dovetail.sdk.formats.json_calls import JsonCalls


class HermesTools(ToolParser):
    """Calls as JSON objects between `<tool_call>` and `</tool_call>`."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""
        return replace(spec, tools=ToolFormat("<tool_call>", "</tool_call>", body=partial(JsonCalls, tools=tools)))

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """Calls as the template writes them, the name first."""
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (
                f'<tool_call>\n{{"name": {json.dumps(name_of(tool))}, "arguments": ',
                json_arguments(tool),
                "}\n</tool_call>",
            ),
            separator="\n",
            trigger="<tool_call>",
        )
