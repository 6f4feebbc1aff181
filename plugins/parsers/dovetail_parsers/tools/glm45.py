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
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.contracts.output import FormatSpec, NewCall, ToolBody, ToolFormat
from dovetail.sdk.formats.call_grammar import Tool, name_of, tagged_arguments
from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.families.tagged_calls import TaggedCalls
from dovetail_parsers.tools.sections import Written, WrittenCalls

TAGS = Tags(key=("<arg_key>", "</arg_key>"), value_start="<arg_value>", value_end="</arg_value>")


class Glm45Tools(WrittenCalls):
    """Calls as a name, keys and values between two markers.

    Attributes:
        markers: Around a call.
        lines: Whether the template puts keys and values on lines of their own.
    """

    markers: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")
    lines: ClassVar[bool] = True
    trigger, between = markers[0], "\n"

    def extend(self, spec: FormatSpec, tools: Sequence[Mapping[str, Any]]) -> FormatSpec:
        """Add the markers."""

        def body(new_call: NewCall) -> ToolBody:
            return TaggedCalls(new_call, TAGS, tools)

        inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
        return replace(spec, tools=ToolFormat(*self.markers, body=body, inner=inner))

    def call(self, tool: Tool) -> Written:
        """As the template of GLM-4.5 writes it; that of 4.7 leaves the newlines out."""
        (start, end), line = self.markers, "\n" if self.lines else ""
        arguments = tagged_arguments(tool, TAGS, behind_key=line, behind_value=line, section_end=end)
        return start + name_of(tool) + line, arguments, end


class IQuestQ1Tools(Glm45Tools):
    r"""`iquest-q1`: IQuest Q1.

    ```
    <iquest_tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></iquest_tool_call>
    ```

    As `glm45`, with other markers around a call.

    Defined by the description of the format in SGLang's `function_call/iquest_q1_detector.py`.
    """

    markers = ("<iquest_tool_call>", "</iquest_tool_call>")
    trigger = markers[0]
    lines = False
