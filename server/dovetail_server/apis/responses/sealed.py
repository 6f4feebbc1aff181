"""What `encrypted_content` of a `compaction` item holds: encoded, neither secret nor signed.

A client may send any conversation that it likes, so an item that it has changed gives it nothing; what is in one is
checked as if it stood in the input itself.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

PREFIX = "dovetail-compaction-1."
"""Tells our items from those of other servers."""


class Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A conversation that has been compacted.

    Attributes:
        summary: What the model wrote.
        replaces: Everything before the item is replaced; else messages of users, system and developer there stay.
        before: Items that stand before the summary, where it replaces everything, and …
        after: … behind it.
    """

    summary: str
    replaces: bool = False
    before: list[dict[str, Any]] = []
    after: list[dict[str, Any]] = []


_decode = msgspec.json.Decoder(Sealed).decode


def seal(content: Sealed) -> str:
    """Return it as `encrypted_content`."""
    return PREFIX + base64.urlsafe_b64encode(msgspec.json.encode(content)).decode("ascii")


def unseal(data: str) -> Sealed:
    """Undo `seal`. The items are as they were sent: nobody has checked them.

    Raises:
        ValueError: It was not written so.
    """
    if not data.startswith(PREFIX):
        raise ValueError("another server wrote it")
    try:
        return _decode(base64.b64decode(data[len(PREFIX) :].encode("ascii"), altchars=b"-_", validate=True))
    except (msgspec.MsgspecError, RecursionError, UnicodeError, binascii.Error) as error:
        raise ValueError(str(error)) from None
