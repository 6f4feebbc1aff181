r"""`inkling`: tool calls of Inkling, see `dovetail_parsers.inkling`.

```
<|message_model|>get_weather<|content_invoke_tool_json|>{"name": "get_weather", "args": {"city": "Rome"}}<|end_message|>
```

Defined by the tml-renderers package (TMLv0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.contracts.tools import ToolParser
from dovetail.sdk.formats.call_grammar import calls_grammar, json_arguments, name_of, optional, sequence, text
from dovetail.sdk.formats.json_calls import JsonCalls
from dovetail.sdk.formats.reply_grammar import answer_message, other_messages
from dovetail_parsers.inkling import CALL, MESSAGES, InklingParser


class InklingTools(ToolParser):
    """Calls as JSON in messages of a kind of their own. Brings its machine also where no reasoning parser does."""

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Say that calls are looked for; the machine knows where."""

        def body(new_call: NewCall) -> ToolBody:
            return JsonCalls(new_call, arguments_keys=("args", "arguments", "parameters"))

        return replace(
            spec,
            machine=InklingParser,
            messages=MESSAGES,
            tools=ToolFormat(CALL, MESSAGES.ends[0], body=body, before_start=""),
        )

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """The whole reply: thinking as the model likes, then calls, or with `auto` an answer."""
        start = optional(text(MESSAGES.start))
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (
                f'{name_of(tool)}{CALL}{{"name": "{name_of(tool)}", "args": ',
                json_arguments(tool),
                "}" + MESSAGES.ends[0],
            ),
            separator=MESSAGES.start,
            trigger=CALL,
            before=sequence(start, other_messages(MESSAGES)),
            instead=answer_message(MESSAGES, {"type": "any_text"}),
        )
