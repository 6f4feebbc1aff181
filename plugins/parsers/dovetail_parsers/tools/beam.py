r"""`beam`: Beam. Harmony's messages (see `dovetail_parsers.harmony`), with tags in its calls.

```
 to=get_weather<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="city">
Paris
</rfl:parameter><|call|>
```

Defined by the response template of Beam's checkpoints, as SGLang's `parser/beam.py` has it.
"""

from __future__ import annotations

from dovetail.sdk.formats.call_grammar import Tool, name_of, tagged_arguments
from dovetail.sdk.formats.reply_grammar import other_messages
from dovetail_parsers.harmony import MESSAGES_AND_CALLS, TAGS
from dovetail_parsers.tools.gpt_oss import GptOssTools
from dovetail_parsers.tools.sections import Written


class BeamTools(GptOssTools):
    """Calls as harmony's messages with a recipient, their arguments as tags."""

    trigger, is_parallel = " to=", True
    between = MESSAGES_AND_CALLS.ends[0] + MESSAGES_AND_CALLS.start + MESSAGES_AND_CALLS.role
    preamble = other_messages(MESSAGES_AND_CALLS)

    def call(self, tool: Tool) -> Written:
        """A message with a recipient, behind thinking as the model likes."""
        header = f" to={name_of(tool)}<|channel|>analysis <|constrain|>xml<|message|>"
        return header, tagged_arguments(tool, TAGS, behind_value=""), ""
