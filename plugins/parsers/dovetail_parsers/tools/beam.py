r"""`beam`: Beam. Harmony's messages (see `dovetail_parsers.harmony`), with tags in its calls.

```
 to=get_weather<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="city">
Paris
</rfl:parameter><|call|>
```

Defined by the response template of Beam's checkpoints, as SGLang's `parser/beam.py` has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.grammar import GrammarSpec
from dovetail.sdk.formats.call_grammar import calls_grammar, name_of, tagged_arguments
from dovetail.sdk.formats.reply_grammar import answer_message, other_messages
from dovetail_parsers.harmony import MESSAGES_AND_CALLS, TAGS
from dovetail_parsers.tools.gpt_oss import GptOssTools


class BeamTools(GptOssTools):
    """Calls as harmony's messages with a recipient, their arguments as tags."""

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, strict: bool, parallel: bool
    ) -> GrammarSpec | None:
        """The whole reply: thinking as the model likes, then calls, or with `auto` an answer."""
        following = MESSAGES_AND_CALLS.ends[0] + MESSAGES_AND_CALLS.start + MESSAGES_AND_CALLS.role
        return calls_grammar(
            tools,
            choice,
            parallel,
            lambda tool: (
                f" to={name_of(tool)}<|channel|>analysis <|constrain|>xml<|message|>",
                tagged_arguments(tool, TAGS, behind_value=""),
                "",
            ),
            separator=following,
            trigger=" to=",
            before=other_messages(MESSAGES_AND_CALLS),
            instead=answer_message(MESSAGES_AND_CALLS, {"type": "any_text"}),
        )
