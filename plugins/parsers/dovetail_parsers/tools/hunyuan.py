r"""`hy-v3`: Hunyuan 3 and 4 (Hy3, Hy4).

```
<tool_calls>
<tool_call>get_weather<tool_sep>
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
</tool_calls>
```

One section holds all calls. Every tag of a model may end in a word of its own, `<tool_calls:opensource>`: it is read
off the template.

Defined by the `chat_template` of tencent/Hy3.
"""

from __future__ import annotations

import re
from typing import ClassVar

from dovetail.contracts.output import TemplateView
from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.tools.sections import TagSection

_WORD = re.compile(r"<tool_calls(:\w+)>")


def tags_of(word: str) -> Tags:
    """Return the tags with their word."""
    return Tags(
        call=(f"<tool_call{word}>", f"<tool_sep{word}>"),
        call_end=f"</tool_call{word}>",
        key=(f"<arg_key{word}>", f"</arg_key{word}>"),
        value_start=f"<arg_value{word}>",
        value_end=f"</arg_value{word}>",
    )


class HunyuanTools(TagSection):
    """Calls as keys and values in one section."""

    start, end = "<tool_calls>", "</tool_calls>"
    tags: ClassVar[Tags] = tags_of("")

    def for_template(self, template: TemplateView) -> HunyuanTools:
        """Take the word from the template."""
        found = _WORD.search(template.source)
        word = found[1] if found else ""
        tags = tags_of(word)
        pieces = (*tags.call, tags.call_end, *tags.key, tags.value_start, tags.value_end)
        made = type(self).__name__
        facts = {"start": f"<tool_calls{word}>", "end": f"</tool_calls{word}>", "tags": tags, "inner": pieces}
        bound: type[HunyuanTools] = type(made, (type(self),), facts)
        return bound()
