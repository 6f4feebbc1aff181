"""Where a route gets its body, and what it becomes. Small ones are read here, in a thread if that takes a while.

Large ones go as they are to a process that can be killed (`reading/`), which returns either the reply, or the prompts
and what is left of the body without them. So do small ones that a checkpoint's template or tokenizer takes long for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dovetail.contracts.api import Route
from dovetail.contracts.errors import RequestError
from dovetail.text.inline import InlineCostError
from dovetail_server.errors.catalogue import ClientGoneError
from dovetail_server.http.auth import CALLER
from dovetail_server.reading.parse import MAX_OBJECTS, check_name, parse
from dovetail_server.reading.tasks import BodyContext, RawTask, Task, no_answer
from dovetail_server.reading.work import read_line
from dovetail_server.serving.prompts import Prompts
from dovetail_server.serving.sse import cancel_on_disconnect

if TYPE_CHECKING:
    from dovetail_server.reading.context import ReadingContext
    from dovetail_server.reading.pool import PromptBeginning
    from dovetail_server.reading.wire import BodyResult

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
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
            raise body_too_large(len(raw), MAX_PLAIN)
        return await read(raw, model, most_objects=PLAIN_OBJECTS)

    return read_plain


def prompt_body(task: Task[M]) -> Callable[[Request], Awaitable[M]]:
    """Return a FastAPI dependency that reads a body with prompts.

    Of a large one it returns what is left without them; `prepared` has them.
    """

    async def read_prompts(request: Request) -> M:
        raw = await raw_body(request)
        state: ReadingContext = request.app.state.server
        if not state.bodies.takes(len(raw)):
            return await read(raw, task.model)
        state.check_ready()
        outcome = await elsewhere(request, state, task, raw)
        request.scope["state"][_PROMPTS] = await asyncio.to_thread(outcome.read_prompts)
        return await read(outcome.light, task.model)

    return read_prompts


async def prepared(request: Request, task: Task[M], work: Callable[[Prompts | None], T]) -> T:
    """Return what `work` makes of a request whose body has been read by `prompt_body(task)`.

    Args:
        request: The request.
        task: See above.
        work: Takes the prompts; None where it makes them itself, which may be too much for this process.

    Raises:
        ClientGoneError: The client left before a worker thread had made it.
        RequestError: From `work`, or from the process that made the prompts.
    """
    # They do not stay in the scope, which is part of a cycle: their memory would wait for the garbage collector.
    prompts: Prompts | None = request.scope["state"].pop(_PROMPTS, None)
    if prompts is None:
        with suppress(InlineCostError):
            return await cancel_on_disconnect(request, asyncio.to_thread(work, None))
        outcome = await elsewhere(request, request.app.state.server, task, await request.body())
        prompts = await asyncio.to_thread(outcome.read_prompts)
    with not_beside_prompts():
        return await cancel_on_disconnect(request, asyncio.to_thread(work, prompts))


async def elsewhere(
    request: Request,
    state: ReadingContext,
    task: Task[Any] | RawTask | Route,
    raw: bytes,
    begun: PromptBeginning | None = None,
) -> BodyResult:
    reading = state.bodies.run(task, raw, owner=CALLER.get().owner, begun=begun)
    return await cancel_on_disconnect(request, reading)


@contextmanager
def not_beside_prompts() -> Iterator[None]:
    """Refuse what a tokenizer that may take long is needed for beside a prompt.

    Raises:
        RequestError: It is.
    """
    try:
        yield
    except InlineCostError as error:
        text = f"bad_words and thinking budgets cannot be used with this model: {error}"
        raise RequestError(text, code="unsupported") from None


async def finished(request: Request, state: ReadingContext, task: Task[Any]) -> Response:
    """Do what a route does with its body, and return the reply."""
    raw = await raw_body(request)
    if not state.bodies.takes(len(raw)):
        body = await read(raw, task.model)
        check_name(body, state.served, task.tag)
        call = BodyContext(text=state.text, request=body, context="", ask=no_answer)
        with suppress(InlineCostError):
            reply = await cancel_on_disconnect(request, asyncio.to_thread(task.run, call))
            return Response(reply, media_type="application/json")
    outcome = await elsewhere(request, state, task, raw)
    return Response(outcome.reply, media_type="application/json")


async def worked(request: Request, state: ReadingContext, task: RawTask) -> bytes:
    """Do something with a body as it was sent, and return what became of it."""
    raw = await raw_body(request)
    if not state.bodies.takes(len(raw)):
        return await asyncio.to_thread(task.run, raw, state.served)
    return (await elsewhere(request, state, task, raw)).reply or b""


def body_too_large(num_bytes: int, most: int) -> RequestError:
    """Return the refusal of a body by its size."""
    text = f"the body has {num_bytes} bytes; what this route takes fits in {most}"
    return RequestError(text, code="body_too_large", status=413)


def check_content_type(content_type: str, raw: bytes) -> None:
    """Refuse other media types: a page in a browser may send those to a local server without asking first."""
    kind = content_type.split(";", 1)[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json") or not raw:
        return
    shown = repr(kind) if kind else "is missing"
    text = f"content-type {shown}: the body must be JSON; send the header content-type: application/json"
    raise RequestError(text, code="unsupported_media_type", status=415)
