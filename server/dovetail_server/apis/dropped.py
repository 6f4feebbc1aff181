"""Tools that other servers run themselves: left out of a request where they are optional, and named in its reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import ConfigDict, Field

from dovetail.contracts.requests import Dropped, JsonObject, Request
from dovetail.processing.refusals import unsupported
from dovetail_server.schema.common import RequestModel

HEADER = "x-dovetail-dropped"


class UnservableTool(RequestModel):
    """A tool that this server cannot run. It is left out, or with `--unservable-tools refuse` a 400."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(max_length=64)]


class DroppedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the request that this server cannot run; the model was not told of it."""

    param: str
    type: Annotated[str, Field(max_length=64)]


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """What became of parts of the request: tools that were left out, and grammars that nothing enforced, by place."""

    dropped: list[DroppedTool] = []
    unenforced: list[str] = []


def notes_of(request: Request) -> Notes | msgspec.UnsetType:
    """Return what a reply says of parts of its request; nothing where there is nothing to say."""
    dropped = [DroppedTool(param=tool.param, type=tool.what) for tool in request.dropped]
    unenforced = request.reply.get("unenforced", [])
    return Notes(dropped=dropped, unenforced=unenforced) if dropped or unenforced else msgspec.UNSET


def header_of(request: Request) -> str:
    """Return the types of the tools that were left out, each once."""
    return ", ".join(dict.fromkeys(tool.what for tool in request.dropped))


def servable(tools: Sequence[Any] | None) -> tuple[list[tuple[int, Any]], list[Dropped]]:
    """Return the tools of a body that are served, each with its number there, and those that are left out."""
    served: list[tuple[int, Any]] = []
    dropped: list[Dropped] = []
    for at, tool in enumerate(tools or ()):
        if isinstance(tool, UnservableTool):
            dropped.append(Dropped(param=f"tools[{at}].type", what=tool.type))
        else:
            served.append((at, tool))
    return served, dropped


def check_optional(dropped: Sequence[Dropped], choice: Any) -> None:
    """Refuse to leave a tool out where a call is asked for: it could be the one that is meant.

    Args:
        dropped: What the server cannot run.
        choice: Whether and what the model has to call, in the chat API's words.

    Raises:
        RequestError: Naming the first tool.
    """
    if dropped and choice not in (None, "auto", "none"):
        why = "this server runs no tools of its own; it can be left out with tool_choice auto only"
        raise unsupported(f"{dropped[0].param} {dropped[0].what!r}", why)


def renamed(served: Sequence[tuple[int, Any]], kept: str = "function") -> JsonObject:
    """Return how refusals that speak of a tool name its place, where tools before it were left out.

    The last comes first: one after the other is applied, and a place may be another tool's number.

    Args:
        served: Each tool that is served, with its number in the body.
        kept: The type of tools whose fields stand under that word in the body, where refusals speak of a function.
    """
    found: JsonObject = {}
    for at, (number, tool) in reversed(list(enumerate(served))):
        if tool.type == kept != "function":
            found[rf"tools\[{at}\]\.function"] = f"tools[{number}].{kept}"
        if at != number:
            found[rf"tools\[{at}\]"] = f"tools[{number}]"
    return found
