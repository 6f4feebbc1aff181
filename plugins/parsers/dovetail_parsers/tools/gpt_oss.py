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

from dovetail.contracts.output import FormatSpec, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, json_arguments, name_of
from dovetail.sdk.formats.reply_grammar import answer_message, other_messages
from dovetail_parsers.harmony import MESSAGES_AND_CALLS, Arguments, HarmonyParser
from dovetail_parsers.tools.sections import Written, WrittenCalls


class GptOssTools(WrittenCalls):
    """Calls as harmony's messages with a recipient. Brings its machine also where no reasoning parser does."""

    trigger, is_parallel = "<|channel|>commentary to=functions.", False
    preamble = other_messages(MESSAGES_AND_CALLS, "<|channel|>commentary")
    answer = answer_message(MESSAGES_AND_CALLS, {"type": "any_text"})

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say that calls are looked for; the machine knows how."""
        return replace(
            spec,
            machine=HarmonyParser,
            messages=MESSAGES_AND_CALLS,
            tools=ToolFormat("<|channel|>", "<|call|>", body=Arguments(tools)),
        )

    def call(self, tool: Tool) -> Written:
        """A message on the channel of commentary, behind thinking and preambles; its `<|call|>` ends the reply."""
        header = f"<|channel|>commentary to=functions.{name_of(tool)} <|constrain|>json<|message|>"
        return header, json_arguments(tool), "<|call|>"
