r"""`glm45`: GLM-4.5, 4.6 and 4.7.

```
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
```

One call per section. Strings stand as they are, other values as JSON; the tool's schema says which. GLM-4.7 writes no
newlines.

Defined by the `chat_template` of zai-org/GLM-4.5 and zai-org/GLM-4.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.output import NewCall, ToolBody
from dovetail.sdk.formats.call_grammar import Tool, name_of, tagged_arguments
from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.families.tagged_calls import TaggedCalls
from dovetail_parsers.tools.sections import Section, Written

TAGS = Tags(key=("<arg_key>", "</arg_key>"), value_start="<arg_value>", value_end="</arg_value>")


class Glm45Tools(Section):
    """Calls as a name, keys and values between two markers.

    Attributes:
        lines: Whether the template puts keys and values on lines of their own.
    """

    start, end = "<tool_call>", "</tool_call>"
    before = between = "\n"
    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    lines: ClassVar[bool] = True
    trigger = start

    def body(self, new_call: NewCall, tools: Sequence[Mapping[str, Any]]) -> ToolBody:
        """Read keys and values."""
        return TaggedCalls(new_call, TAGS, tools)

    def call(self, tool: Tool) -> Written:
        """As the template of GLM-4.5 writes it; that of 4.7 leaves the newlines out."""
        line = "\n" if self.lines else ""
        arguments = tagged_arguments(tool, TAGS, behind_key=line, behind_value=line, section_end=self.end)
        return self.start + name_of(tool) + line, arguments, self.end


class IQuestQ1Tools(Glm45Tools):
    r"""`iquest-q1`: IQuest Q1.

    ```
    <iquest_tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></iquest_tool_call>
    ```

    As `glm45`, with other markers around a call.

    Defined by the description of the format in SGLang's `function_call/iquest_q1_detector.py`.
    """

    start, end = "<iquest_tool_call>", "</iquest_tool_call>"
    trigger = start
    lines = False
