"""What a response refers to: earlier responses that it continues, and stored items in its input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.responses.item_schema import item_kind
from dovetail_server.apis.responses.items import Item, decode_item, input_items, turn_items
from dovetail_server.apis.responses.schema import CompactRequest, ResponsePrompt

NO_REPLY = b'{"output":[]}'
"""Stands for the reply of a turn that is a conversation's items."""
MAX_REFERENCES = 1024
"""Each is looked up in the database."""


class ReferencedItems(msgspec.Struct, frozen=True, kw_only=True):
    """What a response refers to, as JSON.

    Attributes:
        turns: Input items and reply of each response that it continues.
        items: Stored items by their identifiers.
    """

    turns: list[tuple[bytes, bytes]] = []
    items: dict[str, bytes] = {}

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return sum(len(own) + len(body) for own, body in self.turns) + sum(map(len, self.items.values()))


def references_of(request: ResponsePrompt | CompactRequest) -> list[tuple[str, int]]:
    """Return the identifiers of stored items that a request's input refers to, each with its place.

    Raises:
        RequestError: They are too many to look up.
    """
    given = request.input
    items = given if isinstance(given, list) else []
    found = [(str(item["id"]), at) for at, item in enumerate(items) if item_kind(item) == "item_reference"]
    if len(found) > MAX_REFERENCES:
        text = f"input holds more than {MAX_REFERENCES} item references; use previous_response_id, or send the items"
        raise RequestError(text, param="input", code="invalid_value")
    return found


def items_of(given: str | list[dict[str, Any]] | None, response_id: str, found: ReferencedItems) -> Iterator[Item]:
    """Yield the items of a request's input, references resolved."""
    for item in () if given is None else input_items(given, response_id):
        yield decode_item(found.items[item["id"]]) if item["type"] == "item_reference" else item


def items_before(found: ReferencedItems) -> Iterator[Item]:
    """Yield the items of what a request continues."""
    for turn in found.turns:
        yield from turn_items(*turn)
