r"""`kimi-k3`: Kimi-K3.

```
<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>
<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>
<|close|>call<|sep|><|close|>tools<|sep|>
```
(without the line breaks). One section holds all calls. `type` says whether a value is text or JSON.

Defined by the `chat_template` of moonshotai/Kimi-K3.
"""

from __future__ import annotations

import re

from dovetail.sdk.formats.tags import Tags
from dovetail_parsers.tools.sections import TagSection

_NAME = re.compile(r'([^"]*)"?(?:\s+index="\d*")?\s*')
_KEY = re.compile(r'([^"]*)"?(?:\s+type="(\w*)")?\s*')


def read_name(text: str) -> str:
    """Read `get_weather" index="1"`."""
    found = _NAME.fullmatch(text)
    return found[1] if found else text


def read_key(text: str) -> tuple[str, bool | None]:
    """Read `city" type="string"`."""
    found = _KEY.fullmatch(text)
    return (text, None) if found is None else (found[1], None if not found[2] else found[2] == "string")


class KimiK3Tools(TagSection):
    """Calls as elements between markers."""

    start, end = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
    inner = ("<|open|>", "<|close|>", "<|sep|>")
    tags = Tags(
        call=('<|open|>call tool="', "<|sep|>"),
        call_end="<|close|>call<|sep|>",
        key=('<|open|>argument key="', "<|sep|>"),
        value_end="<|close|>argument<|sep|>",
        read_name=read_name,
        read_key=read_key,
    )
    lines = False

    def key(self, name: str, is_string: bool) -> str:
        """Write the key and its type."""
        return f'{name}" type="{"string" if is_string else "object"}"'

    def called(self, name: str) -> str:
        """Write the name and an index."""
        return f'{name}" index="1"'
