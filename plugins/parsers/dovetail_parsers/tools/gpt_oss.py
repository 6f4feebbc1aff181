r"""`gpt-oss`: tool calls of gpt-oss and others that write harmony, see `dovetail_parsers.harmony`.

```
<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
```

A call is a message with a recipient, on any channel. Its text reaches the client as the model wrote it.

Defined by the openai/harmony repository, `docs/format.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.reasoning import FormatSpec, TemplateView
from dovetail.contracts.tools import ToolFormat, ToolParser
from dovetail.text.json_calls import JsonCalls
from dovetail_parsers.harmony import HarmonyParser, Mark


class GptOss(ToolParser):
    """Calls as harmony's messages with a recipient. Brings its machine also where no reasoning parser does."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say that calls are looked for; the machine knows how."""
        return replace(
            spec, machine=HarmonyParser, tools=ToolFormat(Mark.CHANNEL.value, Mark.CALL.value, body=JsonCalls)
        )

    def detect(self, template: TemplateView) -> float:
        """Harmony's markers."""
        return 0.95 if "<|channel|>" in template.source and "<|message|>" in template.source else 0.0
