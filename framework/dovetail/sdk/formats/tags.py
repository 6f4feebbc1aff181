"""`Tags`: the tags of one format of tool calls, and what may stand where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dovetail.sdk.formats.matcher import Matcher, matcher

CDATA_START = "<![CDATA["


def plain_name(text: str) -> str:
    """Read a name that stands alone between its tags."""
    return text.strip()


def plain_key(text: str) -> tuple[str, bool | None]:
    """Read a key that stands alone between its tags."""
    return text.strip(), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of one format.

    Attributes:
        call: What stands before and behind a function's name. Empty: the section begins with the name, which the
            first key or the section's end ends.
        call_end: Closes a call; empty where the section's end does.
        key: What stands before and behind a key.
        value_start: What opens the value behind the key; empty where the value follows at once.
        value_end: Closes a value.
        newlines: Whether one newline on either side of a value belongs to the tags.
        spelled: Other spellings of opening tags, each with the tag that it stands for.
        cdata: Whether a value may stand in `<![CDATA[…]]>`. Values come when they are complete then.
        read_name: Takes the name from the text between `call`.
        read_key: Takes the key from the text between `key`, and whether its value is a string (None: the schema says).
    """

    call: tuple[str, str] = ("", "")
    call_end: str = ""
    key: tuple[str, str]
    value_start: str = ""
    value_end: str
    newlines: bool = False
    spelled: tuple[tuple[str, str], ...] = ()
    cdata: bool = False
    read_name: Callable[[str], str] = plain_name
    read_key: Callable[[str], tuple[str, bool | None]] = plain_key


def spellings(tags: Tags, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return tags that there are, and all other spellings of them."""
    return tuple(filter(None, (*wanted, *(text for text, meant in tags.spelled if meant in wanted))))


@lru_cache(maxsize=64)
def matchers(tags: Tags) -> dict[str, Matcher]:
    """Return the tags that count in each place."""
    places = {
        "call": (tags.call[0],),
        "name": (tags.call[1] if tags.call[0] else tags.key[0],),
        "params": (tags.key[0], tags.call_end),
        "key": (tags.key[1], tags.key[0], tags.call_end),
        "gap": (tags.value_start, tags.key[0], tags.call_end),
        "value": (tags.value_end, tags.call_end, tags.key[0]),
    }
    return {at: matcher(spellings(tags, texts)) for at, texts in places.items()}
