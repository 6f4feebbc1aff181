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

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, ToolFormat
from dovetail.contracts.tools import ToolParser
from dovetail.sdk.formats.call_grammar import calls_grammar, json_arguments, name_of
from dovetail.sdk.formats.reply_grammar import answer_message, other_messages
from dovetail_parsers.harmony import MESSAGES_AND_CALLS, Arguments, HarmonyParser


class GptOssTools(ToolParser):
    """Calls as harmony's messages with a recipient. Brings its machine also where no reasoning parser does."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say that calls are looked for; the machine knows how."""
        return replace(
            spec,
            machine=HarmonyParser,
            messages=MESSAGES_AND_CALLS,
            tools=ToolFormat("<|channel|>", "<|call|>", body=Arguments(tools)),
        )

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """The whole reply: thinking and preambles as the model likes, then one call, or with `auto` an answer.

        A call stands on the channel of commentary, and its `<|call|>` ends the reply.
        """
        return calls_grammar(
            tools,
            choice,
            False,
            lambda tool: (
                f"<|channel|>commentary to=functions.{name_of(tool)} <|constrain|>json<|message|>",
                json_arguments(tool),
                "<|call|>",
            ),
            trigger="<|channel|>commentary to=functions.",
            before=other_messages(MESSAGES_AND_CALLS, "<|channel|>commentary"),
            instead=answer_message(MESSAGES_AND_CALLS, {"type": "any_text"}),
        )
