"""Running one line through the code that serves HTTP requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dovetail.contracts.api import Route
from dovetail.contracts.errors import EngineDeadError, RequestError
from dovetail.contracts.requests import Request
from dovetail.messages import BACKGROUND
from dovetail.text.inline import InlineCostError
from dovetail_server.apis.responses.schema import ResponsesRequest
from dovetail_server.apis.routes import CHAT, COMPLETIONS, MESSAGES
from dovetail_server.apis.watch import WATCH
from dovetail_server.batches.result import LineUsage, Result, decode_head, refusal, result_line
from dovetail_server.errors import catalogue as errors
from dovetail_server.http.auth import CALLER
from dovetail_server.reading import responses as response_bodies
from dovetail_server.reading import tasks
from dovetail_server.reading.parse import of_route, parse
from dovetail_server.reading.pool import DIED
from dovetail_server.reading.request import not_beside_prompts
from dovetail_server.reading.work import read_line
from dovetail_server.schema.pooled import PooledFields
from dovetail_server.schema.unknown import LEFT_OUT, LeftOut
from dovetail_server.serving import run
from dovetail_server.serving.job import Job, make_job

if TYPE_CHECKING:
    from dovetail_server.reading.context import ReadingContext
    from dovetail_server.reading.wire import BodyResult
    from dovetail_server.serving.prompts import Prompts

GENERATING = {route.path: route for route in (CHAT, COMPLETIONS, MESSAGES)}
POOLED: dict[str, tasks.PooledTask[Any]] = {
    "/v1/embeddings": tasks.EMBEDDINGS,
    "/v1/rerank": tasks.RERANK,
    "/v1/score": tasks.SCORE,
    "/v1/classify": tasks.CLASSIFY,
}
Reply = Callable[[], Awaitable[tuple[bytes, LineUsage]]]
MAX_FAULTS = 3
"""A line that fails for a reason of ours is tried so often."""
BUSY_WAIT_S = 0.25


async def run_line(state: ReadingContext, endpoint: str, custom_id: str, raw: bytes) -> Result:
    """Run one line.

    Args:
        state: The server's.
        endpoint: The batch's.
        custom_id: The line's.
        raw: The line as it stands in the input file.

    Raises:
        ServiceError: The server cannot run it now.
        EngineDeadError: The engine is gone.
    """
    state.check_ready()
    if state.settings.unknown_fields == "warn":
        LEFT_OUT.set(LeftOut(state.unknown_fields.count))
    try:
        reply = await prepare(state, endpoint, raw)
    except RequestError as error:
        return refusal(custom_id, error, state.owners.get(endpoint))
    try:
        body, usage = await reply()
    except RequestError as error:
        if error.code == "request_aborted" and state.is_draining:
            raise errors.draining() from error  # cut off by the server's end: it is run again
        return refusal(custom_id, error, state.owners.get(endpoint))
    return Result(result_line(custom_id, 200, body), False, usage)


async def run_to_end(state: ReadingContext, endpoint: str, custom_id: str, raw: bytes) -> Result:
    """Run a line until it has a result; faults of ours are tried again, a few times.

    Raises:
        ServiceError: The server ends.
        EngineDeadError: The engine is gone.
    """
    faults = 0
    while True:
        try:
            return await run_line(state, endpoint, custom_id, raw)
        except EngineDeadError:
            raise
        except errors.ServiceError as error:
            if error.status == 503 and error.code != DIED:
                raise
            if error.status != 429:
                faults += 1
            if faults >= MAX_FAULTS:
                return refusal(custom_id, error, state.owners.get(endpoint))
        except Exception as error:
            faults += 1
            if faults >= MAX_FAULTS:
                return refusal(custom_id, error, state.owners.get(endpoint))
        await asyncio.sleep(BUSY_WAIT_S)


async def prepare(state: ReadingContext, endpoint: str, raw: bytes) -> Reply:
    """Check a line as its HTTP request would be, and return what makes its reply.

    Raises:
        RequestError: The request cannot be served as it is.
        ServiceError: What it refers to cannot be read now, or the process that read the line died.
    """
    if endpoint == "/v1/responses":
        return await prepare_response(state, raw)
    if (route := GENERATING.get(endpoint) or state.routes.get(endpoint)) is not None:
        return await prepare_generating(state, route, raw)
    task = POOLED[endpoint]
    if not state.bodies.takes(len(raw)):
        with suppress(InlineCostError):
            return await asyncio.to_thread(lambda: pooled_reply(state, task, parse(read_line(raw), task.model), None))
    outcome = await elsewhere(state, task, raw)
    with not_beside_prompts():
        return await asyncio.to_thread(
            lambda: pooled_reply(state, task, parse(outcome.light, task.model), outcome.read_prompts())
        )


async def elsewhere(state: ReadingContext, task: tasks.Task[Any] | Route, raw: bytes) -> BodyResult:
    """Have another process read a line."""
    return await state.bodies.run(task, raw, owner=CALLER.get().owner, is_background=True, is_line=True)


async def prepare_generating(state: ReadingContext, route: Route, raw: bytes) -> Reply:
    """As `prepare`, for a route that generates."""
    may_stall = route.path in state.routes and state.bodies.is_on and WATCH.is_timed_here()
    if not may_stall and not state.bodies.takes(len(raw)):
        with suppress(InlineCostError):
            return await asyncio.to_thread(
                lambda: reply_to(state, route, of_route(read_line(raw), route), is_rendered=False)
            )
    outcome = await elsewhere(state, route, raw)
    with not_beside_prompts():
        return await asyncio.to_thread(lambda: reply_to(state, route, outcome.read_requests(), is_rendered=True))


def reply_to(state: ReadingContext, route: Route, requests: list[Request], *, is_rendered: bool) -> Reply:
    """Prepare what a line asks for, and return what makes its reply; CPU work. The output file is where it is kept."""
    if requests[0].stream and route.path in state.routes:
        raise errors.unsupported("stream", f"{route.path} answers it with a stream, and a batch writes whole replies")
    refuse_stream(requests[0].stream)
    background = [replace(request, priority=BACKGROUND, keeps=None) for request in requests]
    job = make_job(state, route, background, is_rendered=is_rendered)
    return lambda: generated(job)


async def generated(job: Job) -> tuple[bytes, LineUsage]:
    """Run a job to its end, and return the reply and what it counted, whatever its API shows of that."""
    body = await run.reply(job)
    return body, LineUsage.of(job.reply.tokens)


async def pooled(work: Coroutine[Any, Any, bytes]) -> tuple[bytes, LineUsage]:
    """Return a reply that generated nothing, and the tokens that it says it took."""
    body = await work
    return body, decode_head(body).usage


async def prepare_response(state: ReadingContext, raw: bytes) -> Reply:
    """As `prepare`, for a response. It is stored only where the line says so: the output file has it anyway."""

    def adjusted(asked: ResponsesRequest) -> ResponsesRequest:
        refuse_stream(asked.stream)
        if asked.background:
            raise errors.unsupported("background", "a batch runs in the background anyway; leave it out")
        return asked.model_copy(update={"priority": BACKGROUND, "store": asked.store is True})

    job = await response_bodies.begin(state, raw, CALLER.get().owner, adjusted, is_line=True)
    return lambda: generated(job)


def pooled_reply(
    state: ReadingContext, task: tasks.PooledTask[Any], asked: PooledFields, prompts: Prompts | None
) -> Reply:
    """Prepare a line that generates nothing; CPU work.

    Args:
        state: The server's.
        task: What the line asks for.
        asked: The line's request.
        prompts: Of a large line.
    """
    model = state.check_model(asked.model)
    job = task.prepare(state, asked.model_copy(update={"priority": BACKGROUND}), model, prompts)
    return lambda: pooled(job.reply())


def refuse_stream(stream: bool | None) -> None:
    """Refuse what has no meaning in a file."""
    if stream:
        raise errors.unsupported("stream", "a batch writes whole replies; leave it out")
