"""Where a route that generates gets its requests from: a body is read here, in a thread, or by another process."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest

from dovetail.contracts.api import Route
from dovetail.contracts.requests import Request
from dovetail.text.inline import InlineCostError
from dovetail_server.apis.watch import WATCH
from dovetail_server.reading.parse import of_route
from dovetail_server.reading.request import IN_THREAD, elsewhere, not_beside_prompts, raw_body
from dovetail_server.reading.wire import PromptBegun, unpacked
from dovetail_server.serving.early import EarlyPrefill
from dovetail_server.serving.job import Job, make_job
from dovetail_server.serving.sse import cancel_on_disconnect

if TYPE_CHECKING:
    from dovetail_server.reading.context import ReadingContext

INLINE_S = 0.05
"""A package's `read` may hold others up so long; then another process reads the body, …"""
SLOW_S = 10.0
"""… and all bodies of its route for so long."""


async def job_of(http: HttpRequest, state: ReadingContext, route: Route, *, runs: bool = True) -> Job:
    """Read a body, and put the job together that answers it.

    Preparing is checking, rendering a template and tokenizing. A thread keeps the event loop free, and costs a short
    request a quarter of all processor time that the server spends on it, so short ones do without. Large bodies, and
    small ones that a checkpoint's template or tokenizer takes long for, go to a process that can be killed.

    Args:
        http: Whose body it is.
        state: The server's.
        route: Reads it.
        runs: The job will be run; else nothing of it goes to the engine.

    Raises:
        RequestError: It cannot be served as it is.
        ClientGoneError: The client left before.
    """
    raw = await raw_body(http)
    if not state.bodies.takes(len(raw)):
        with suppress(InlineCostError):
            if route.path in state.routes and WATCH.is_timed_here():
                requests = of_package(state, route, raw)
            elif len(raw) <= IN_THREAD and route.path not in state.routes:
                requests = await state.parsing.run(partial(of_route, raw, route))
            else:
                requests = await state.in_thread(of_route, raw, route)

            def work() -> Job:
                state.check_ready()
                return make_job(state, route, requests)

            if state.quick.has(requests, len(raw)):
                # A package's writer is ended by a signal to the main thread, where it does not end.
                return work() if route.path in state.routes else await state.together.run(work)
            return await cancel_on_disconnect(http, state.in_thread(state.quick.timed(work, requests)))
    state.check_ready()
    early = EarlyPrefill(state)

    def begun(message: PromptBegun) -> None:
        known = unpacked(message.ids).tolist(), message.num_about, message.seconds
        early.begin(*known, message.priority, message.cache_salt)

    def finish() -> Job:
        return make_job(state, route, outcome.read_requests(), is_rendered=True)

    try:
        outcome = await elsewhere(http, state, route, raw, begun if runs else None)
        with not_beside_prompts():
            job = await cancel_on_disconnect(http, state.in_thread(finish))
    except BaseException:
        early.close()
        raise
    job.generation.early = early
    return job


def of_package(state: ReadingContext, route: Route, raw: bytes) -> list[Request]:
    """Read a small body on a package's route, whose `read` takes microseconds, or any time of what a client sends.

    Raises:
        InlineCostError: It took too long here, or did so lately, and another process is there to read it.
        RequestError: See `of_route`.
    """
    if state.bodies.is_on:
        if len(raw) > IN_THREAD or time.monotonic() < state.slow_until.get(route.path, 0.0):
            raise InlineCostError
        WATCH.inline_s = INLINE_S
    try:
        return WATCH.run(f"reading a body of {route.path}", of_route, raw, route)
    except InlineCostError:
        state.slow_until[route.path] = time.monotonic() + SLOW_S
        raise
    finally:
        WATCH.inline_s = 0.0
