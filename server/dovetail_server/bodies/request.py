"""Where a route gets its body. Small ones are read here, in a thread if that takes a while.

Large ones go as they are to a process that can be killed (`bodies/`), which gives back either the reply, or the prompts
and what is left of the body without them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dovetail.errors import RequestError
from dovetail_server.auth import CALLER
from dovetail_server.bodies.tasks import Call, RawTask, Task, no_answer
from dovetail_server.bodies.work import read_line
from dovetail_server.density import MAX_OBJECTS
from dovetail_server.errors import ClientGoneError
from dovetail_server.reading import check_name, parse
from dovetail_server.serving.prompts import Prompts
from dovetail_server.serving.sse import cancel_on_disconnect

if TYPE_CHECKING:
    from dovetail_server.bodies.context import ReadingContext

M = TypeVar("M", bound=BaseModel)
IN_THREAD = 1 << 15
"""Bodies above this many bytes are parsed in a worker thread: a thousand tiny messages take 5 ms."""
MAX_PLAIN = 1 << 20
"""Bytes of a body that holds no prompt."""
PLAIN_OBJECTS = 1 << 14
"""Objects and lists in it: it is parsed in this process, and so many take 10 ms."""
_PROMPTS = "prompts"


async def raw_body(request: Request) -> bytes:
    """Return a body as it was sent.

    Raises:
        RequestError: It is no JSON by its type.
        ClientGoneError: The client left.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ClientGoneError("the client left while sending its body") from None
    check_content_type(request.headers.get("content-type", ""), raw)
    return raw


async def read(raw: bytes, model: type[M], *, is_line: bool = False, most_objects: int = MAX_OBJECTS) -> M:
    """Read a body, or with `is_line` that of a batch's line; `most_objects` as in `check_density`.

    Raises:
        RequestError: See `parse`.
    """

    def work() -> M:
        return parse(read_line(raw) if is_line else raw, model, most_objects)

    return await asyncio.to_thread(work) if len(raw) > IN_THREAD or is_line else work()


def json_body(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """Return a FastAPI dependency that reads a body without a prompt as `model`."""

    async def read_plain(request: Request) -> M:
        raw = await raw_body(request)
        if len(raw) > MAX_PLAIN:
            text = f"the body has {len(raw)} bytes; what this route takes fits in {MAX_PLAIN}"
            raise RequestError(text, code="body_too_large", status=413)
        return await read(raw, model, most_objects=PLAIN_OBJECTS)

    return read_plain


def prompt_body(task: Task[M]) -> Callable[[Request], Awaitable[M]]:
    """Return a FastAPI dependency that reads a body with prompts.

    Of a large one it returns what is left without them; `take_prompts` has them.
    """

    async def read_prompts(request: Request) -> M:
        raw = await raw_body(request)
        state: ReadingContext = request.app.state.server
        if not state.bodies.takes(len(raw)):
            return await read(raw, task.model)
        state.check_ready()
        outcome = await cancel_on_disconnect(request, state.bodies.run(task, raw, owner=CALLER.get().owner))
        request.scope["state"][_PROMPTS] = await asyncio.to_thread(outcome.read_prompts)
        return await read(outcome.light, task.model)

    return read_prompts


def take_prompts(request: Request) -> Prompts | None:
    """Return the prompts of a large body, once; None where they are to be made of the request.

    They do not stay in the scope, which is part of a cycle: their memory would wait for the garbage collector.
    """
    found: Prompts | None = request.scope["state"].pop(_PROMPTS, None)
    return found


async def finished(request: Request, state: ReadingContext, task: Task[Any]) -> Response:
    """Do what a route does with its body, and return the reply."""
    raw = await raw_body(request)
    if state.bodies.takes(len(raw)):
        outcome = await cancel_on_disconnect(request, state.bodies.run(task, raw, owner=CALLER.get().owner))
        return Response(outcome.reply, media_type="application/json")
    body = await read(raw, task.model)
    check_name(body, state.served_names)
    call = Call(text=state.text, request=body, context="", ask=no_answer)
    return Response(
        await cancel_on_disconnect(request, asyncio.to_thread(task.run, call)), media_type="application/json"
    )


async def worked(request: Request, state: ReadingContext, task: RawTask) -> bytes:
    """Do something with a body as it was sent, and return what became of it."""
    raw = await raw_body(request)
    if not state.bodies.takes(len(raw)):
        return await asyncio.to_thread(task.run, raw, state.served_names)
    outcome = await cancel_on_disconnect(request, state.bodies.run(task, raw, owner=CALLER.get().owner))
    return outcome.reply or b""


def check_content_type(content_type: str, raw: bytes) -> None:
    """Refuse other media types: a page in a browser may send those to a local server without asking first."""
    kind = content_type.split(";", 1)[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json") or not raw:
        return
    shown = repr(kind) if kind else "is missing"
    text = f"content-type {shown}: the body must be JSON; send the header content-type: application/json"
    raise RequestError(text, code="unsupported_media_type", status=415)
