"""Running one line through the code that serves HTTP requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dovetail.errors import EngineDeadError, RequestError
from dovetail.messages import BACKGROUND
from dovetail.text.inline import InlineCostError
from dovetail_server import errors
from dovetail_server.anthropic import messages
from dovetail_server.anthropic.schema import MessagesRequest
from dovetail_server.auth import CALLER
from dovetail_server.batches.result import Result, decode_head, refusal, result_line
from dovetail_server.bodies import responses as response_bodies
from dovetail_server.bodies import tasks
from dovetail_server.bodies.pool import DIED
from dovetail_server.bodies.request import not_beside_prompts
from dovetail_server.bodies.work import read_line
from dovetail_server.native.score import ScoreRequest
from dovetail_server.openai.chat import ChatRequest
from dovetail_server.openai.completions import CompletionRequest
from dovetail_server.openai.embeddings import EmbeddingRequest
from dovetail_server.openai.rerank import ClassifyRequest, RerankRequest
from dovetail_server.openai.responses import ResponsesRequest
from dovetail_server.reading import parse
from dovetail_server.responses.job import reply as reply_of
from dovetail_server.serving import chat, chat_reply, completions, embeddings, rerank, score

if TYPE_CHECKING:
    from dovetail_server.bodies.context import ReadingContext
    from dovetail_server.serving.prompts import Prompts

Pooled = EmbeddingRequest | RerankRequest | ScoreRequest | ClassifyRequest
Reply = Callable[[], Awaitable[bytes]]
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
    try:
        reply = await prepare(state, endpoint, raw)
    except RequestError as error:
        return refusal(custom_id, error)
    try:
        body = await reply()
    except RequestError as error:
        if error.code == "request_aborted" and state.is_draining:
            raise errors.draining() from error  # cut off by the server's end: it is run again
        return refusal(custom_id, error)
    return Result(result_line(custom_id, 200, body), False, decode_head(body).usage.as_chat())


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
                return refusal(custom_id, error)
        except Exception as error:
            faults += 1
            if faults >= MAX_FAULTS:
                return refusal(custom_id, error)
        await asyncio.sleep(BUSY_WAIT_S)


async def prepare(state: ReadingContext, endpoint: str, raw: bytes) -> Reply:
    """Check a line as its HTTP request would be, and return what makes its reply.

    Raises:
        RequestError: The request cannot be served as it is.
        ServiceError: What it refers to cannot be read now, or the process that read the line died.
    """
    if endpoint == "/v1/responses":
        return await prepare_response(state, raw)
    known: dict[str, tasks.Task[Any]] = {
        "/v1/chat/completions": tasks.CHAT,
        "/v1/messages": tasks.MESSAGES,
        "/v1/embeddings": tasks.EMBEDDINGS,
        "/v1/rerank": tasks.RERANK,
        "/v1/score": tasks.SCORE,
        "/v1/classify": tasks.CLASSIFY,
    }
    task = known.get(endpoint, tasks.COMPLETIONS)
    if not state.bodies.takes(len(raw)):
        with suppress(InlineCostError):
            return await asyncio.to_thread(lambda: job_of(state, parse(read_line(raw), task.model), None))
    owner = CALLER.get().owner
    outcome = await state.bodies.run(task, raw, owner=owner, is_background=True, is_line=True)
    with not_beside_prompts():
        return await asyncio.to_thread(lambda: job_of(state, parse(outcome.light, task.model), outcome.read_prompts()))


async def prepare_response(state: ReadingContext, raw: bytes) -> Reply:
    """As `prepare`, for a response. It is stored only where the line says so: the output file has it anyway."""

    def adjusted(asked: ResponsesRequest) -> ResponsesRequest:
        refuse_stream(asked.stream)
        if asked.background:
            raise errors.unsupported("background", "a batch runs in the background anyway; leave it out")
        return asked.model_copy(update={"priority": BACKGROUND, "store": asked.store is True})

    job = await response_bodies.begin(state, raw, CALLER.get().owner, adjusted, is_line=True)
    return lambda: reply_of(job)


def job_of(
    state: ReadingContext,
    asked: ChatRequest | CompletionRequest | MessagesRequest | Pooled,
    prompts: Prompts | None,
) -> Reply:
    """Prepare what needs nothing but the line; CPU work.

    Args:
        state: The server's.
        asked: The line's request.
        prompts: Of a large line.
    """
    model = state.check_model(asked.model)
    asked = asked.model_copy(update={"priority": BACKGROUND})
    if isinstance(asked, EmbeddingRequest):
        embedding_job = embeddings.prepare(state, asked, model, prompts)
        return lambda: embeddings.reply(embedding_job)
    if isinstance(asked, ScoreRequest) and not rerank.is_pair(asked):
        score_job = score.prepare(state, asked, model, prompts)
        return lambda: score.reply(score_job)
    if isinstance(asked, (RerankRequest, ScoreRequest, ClassifyRequest)):
        pair_job = rerank.prepare(state, asked, model, prompts)
        return lambda: rerank.reply(pair_job)
    refuse_stream(asked.stream)
    if isinstance(asked, ChatRequest):
        chat_job = chat.prepare(state, asked, model, prompts)
        return lambda: chat_reply.reply(chat_job)
    if isinstance(asked, MessagesRequest):
        message_job = messages.prepare(state, asked, model, prompts)
        return lambda: messages.reply(message_job)
    job = completions.prepare(state, asked, model, prompts)
    return lambda: completions.reply(job)


def refuse_stream(stream: bool | None) -> None:
    """Refuse what has no meaning in a file."""
    if stream:
        raise errors.unsupported("stream", "a batch writes whole replies; leave it out")
