"""What is done with stored chat completions without their database, which a server imports when it first needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail_server.compat.endpoints import why_not

if TYPE_CHECKING:
    from sqlalchemy.engine import RowMapping


def written(metadata: Mapping[str, str]) -> str:
    """Write metadata as JSON, in the form that `CompletionStore.page` looks at."""
    return msgspec.json.encode(dict(metadata)).decode()


def missing(completion_id: str) -> RequestError:
    """Return the 404 of a completion, or of a route of a peer's that looks like one."""
    why = why_not(f"/v1/chat/completions/{completion_id}")
    text = why or (
        f"no chat completion {completion_id!r} here: it was not stored (store: true), was deleted, or has been given "
        "up as too old"
    )
    return RequestError(text, param="completion_id", code="completion_not_found", status=404)


def with_metadata(row: RowMapping) -> bytes:
    """Return a stored completion as it is shown."""
    return bytes(row["body"])[:-1] + b',"metadata":' + str(row["metadata"]).encode() + b"}"


def shown_messages(completion_id: str, messages: bytes) -> list[dict[str, Any]]:
    """Return a stored completion's messages, each with an id; content in parts stands in `content_parts`."""
    found = []
    for at, message in enumerate(msgspec.json.decode(messages)):
        content = message.get("content")
        shown = {"id": f"{completion_id}-{at}", **message, "content": content if isinstance(content, str) else None}
        found.append(shown | ({"content_parts": content} if isinstance(content, list) else {}))
    return found
