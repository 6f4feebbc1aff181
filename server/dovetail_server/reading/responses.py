"""Where a Responses request comes in: what it refers to is fetched, then it is prepared."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request as HttpRequest

from dovetail.contracts.errors import RequestError
from dovetail.processing.input import Preparation
from dovetail.text.inline import InlineCostError
from dovetail_server.apis.responses import compacting, compaction, prompt
from dovetail_server.apis.responses import request as responses
from dovetail_server.apis.responses.background import writer_of
from dovetail_server.apis.responses.compacting import CompactingGeneration
from dovetail_server.apis.responses.items import new_response_id
from dovetail_server.apis.responses.keeper import LAST, ResponseRecorder, Turns
from dovetail_server.apis.responses.objects import CompactedResponse
from dovetail_server.apis.responses.references import NO_REPLY, ReferencedItems, references_of
from dovetail_server.apis.responses.request import ReadItems
from dovetail_server.apis.responses.schema import CompactRequest, InputTokensRequest, ResponsesRequest
from dovetail_server.apis.routes import RESPONSES as ROUTE
from dovetail_server.errors import catalogue as errors
from dovetail_server.reading.quick import TEXT_BYTES
from dovetail_server.reading.request import not_beside_prompts, read
from dovetail_server.reading.tasks import COMPACT, INPUT_TOKENS, RESPONSES, Task
from dovetail_server.reading.wire import BodyResult, Question
from dovetail_server.serving.job import Job, make_job
from dovetail_server.serving.sse import cancel_on_disconnect

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.apis.responses.conversations import ConversationStore
    from dovetail_server.apis.responses.store import ResponseStore
    from dovetail_server.reading.context import ReadingContext

logger = logging.getLogger("dovetail.server")
T = TypeVar("T")
Q = TypeVar("Q", InputTokensRequest, CompactRequest)
Adjust = Callable[[ResponsesRequest], ResponsesRequest]


async def begin(
    state: ReadingContext,
    raw: bytes,
    owner: str,
    adjust: Adjust = lambda request: request,
    *,
    is_line: bool = False,
    http: HttpRequest | None = None,
) -> Job:
    """Read, check and prepare a request; as of chats, a short one on the event loop.

    Args:
        state: The server's.
        raw: The body, or with `is_line` a line of a batch.
        owner: Whose stored responses it may refer to.
        adjust: Changes the request, or refuses it.
        is_line: See `raw`.
        http: Whose client is watched while a thread or another process works; None: somebody else does.

    Raises:
        RequestError: It cannot be served as it is, or refers to what is not there.
        ClientGoneError: The client left before.
        ServiceError: What it refers to, or where it must be stored, cannot be reached now.
    """
    entry = BodyEntry(state, owner, adjust)
    found: ReferencedItems | None = None
    if not state.bodies.takes(len(raw)):
        request = await read(raw, ResponsesRequest, is_line=is_line)
        found = await entry.open(request, references_of(request))
        if not state.bodies.takes(found.num_bytes):
            with suppress(InlineCostError):
                work, is_short = entry.preparing(found, len(raw) + found.num_bytes)
                return await (state.together.run(work) if is_short else watched(http, state.in_thread(work)))
    reading = state.bodies.run(
        RESPONSES,
        raw,
        owner=owner,
        is_line=is_line,
        context=entry.response_id,
        answer=entry.answer if found is None else given(found),
    )
    outcome = await watched(http, reading)
    with not_beside_prompts():
        return await watched(http, state.in_thread(lambda: entry.job(read_items(outcome))))


async def watched(http: HttpRequest | None, work: Coroutine[Any, Any, T]) -> T:
    """Await what takes long, for as long as its client waits, where there is one."""
    return await (work if http is None else cancel_on_disconnect(http, work))


async def unanswered(
    state: ReadingContext,
    raw: bytes,
    entry: BodyEntry,
    task: Task[Q],
    here: Callable[[Processor, Q, str, ReferencedItems], T],
    elsewhere: Callable[[BodyResult], T],
) -> T:
    """Read a body that is not answered itself, and return what is made of it.

    Args:
        state: The server's.
        raw: The body.
        entry: What it refers to is fetched by it.
        task: What another process reads it as.
        here: Reads it in a thread of this process.
        elsewhere: Unpacks what another process has read.

    Raises:
        RequestError: See `begin`.
        ServiceError: See `begin`.
    """
    answer = entry.answer_of(task.model)
    if not state.bodies.takes(len(raw)):
        request = await read(raw, task.model)
        found = await entry.open(responses.as_response(request), references_of(request))
        if not state.bodies.takes(found.num_bytes):
            with suppress(InlineCostError):
                return await asyncio.to_thread(here, state.text, request, entry.response_id, found)
        answer = given(found)
    outcome = await state.bodies.run(task, raw, owner=entry.owner, context=entry.response_id, answer=answer)
    return await asyncio.to_thread(elsewhere, outcome)


async def count(state: ReadingContext, raw: bytes, owner: str) -> bytes:
    """Count the tokens of a response's prompt, nothing left out, and return the reply.

    Raises:
        RequestError: See `begin`.
        ServiceError: See `begin`.
    """
    entry = BodyEntry(state, owner)
    return await unanswered(state, raw, entry, INPUT_TOKENS, responses.count, lambda outcome: outcome.reply or b"")


async def compact(state: ReadingContext, raw: bytes, owner: str) -> CompactedResponse:
    """Make a conversation shorter.

    Raises:
        RequestError: See `begin`; or it does not fit the context.
        ServiceError: See `begin`; or the model wrote no summary.
    """
    entry = BodyEntry(state, owner)
    made = await unanswered(state, raw, entry, COMPACT, prompt.read_compact, read_items)
    return await compacting.compact(state, made.request, made.items, entry.response_id)


def read_items(outcome: BodyResult) -> ReadItems:
    """Unpack what another process has read."""
    return ReadItems(next(iter(outcome.read_requests()), None), outcome.items, outcome.plan)


def given(found: ReferencedItems) -> Callable[[Question], asyncio.Future[ReferencedItems]]:
    """Return what answers a question with what is known already."""

    def answer(_: Question) -> asyncio.Future[ReferencedItems]:
        known: asyncio.Future[ReferencedItems] = asyncio.get_running_loop().create_future()
        known.set_result(found)
        return known

    return answer


class BodyEntry:
    """One request on its way in."""

    def __init__(self, state: ReadingContext, owner: str, adjust: Adjust = lambda request: request) -> None:
        """Begin; see `begin`."""
        self.state = state
        self.owner = owner
        self.response_id = new_response_id()
        self._adjust = adjust
        self._request = ResponsesRequest.model_construct()
        self._store: ResponseStore | None = None
        self._conversations: ConversationStore | None = None
        self._last = LAST.get()  # here: what reads a large body asks from a task of its own
        self._turns: Turns | None = None

    async def open(self, request: ResponsesRequest, references: list[tuple[str, int]]) -> ReferencedItems:
        """Check the request, find the store if it is needed, and fetch what it refers to.

        Raises:
            RequestError: See `begin`.
            ServiceError: See `begin`.
        """
        self._request = request = self._adjust(request)
        self.state.check_model(request.model)
        responses.check(request)
        turns = self._turns = None if self._last is None else self._last.find(request.previous_response_id)
        refers = bool(references) or (request.previous_response_id is not None and turns is None)
        store = self._store = await open_store(self.state, request, refers=refers)
        if request.conversation is not None:
            self._conversations = await self.state.stored_conversations()
            before = await self._conversations.whole(self.owner, request.conversation.id, "conversation")
            turns = [(before, NO_REPLY)]
        if store is None:
            return ReferencedItems(turns=turns or [])
        if request.previous_response_id is not None and turns is None:
            turns = await store.chain(self.owner, request.previous_response_id)
        items = {}
        for identifier, at in references:
            items[identifier] = msgspec.json.encode(await store.item(self.owner, identifier, f"input[{at}].id"))
        return ReferencedItems(turns=turns or [], items=items)

    async def answer(self, question: Question) -> ReferencedItems:
        """As `open`, for a body that is read elsewhere."""
        return await self.open(await read(question.light, ResponsesRequest), question.references)

    def answer_of(
        self, model: type[InputTokensRequest | CompactRequest]
    ) -> Callable[[Question], Awaitable[ReferencedItems]]:
        """As `answer`, for a body that is not answered itself."""

        async def answer(question: Question) -> ReferencedItems:
            request = await read(question.light, model)
            return await self.open(responses.as_response(request), question.references)

        return answer

    def preparing(self, found: ReferencedItems, num_bytes: int) -> tuple[Callable[[], Job], bool]:
        """Return what prepares a body that has been read here, and whether that is too quick to hold others up.

        Args:
            found: What it refers to.
            num_bytes: Of the body, and of what it refers to.

        Raises:
            RequestError: See `begin`.
        """
        text, rows = self.state.text, bytearray()
        if num_bytes > TEXT_BYTES or prompt.may_compact(self._request):
            return lambda: self.job(prompt.read_prompt(text, self._request, self.response_id, found)), False
        request = responses.read(self._request, self.response_id, found, rows)

        def work() -> Job:
            return self.job(ReadItems(Preparation(text, request).rendered(), bytes(rows)))

        if self.state.quick.has([request], num_bytes):
            return work, True
        return self.state.quick.timed(work, [request]), False

    def job(self, made: ReadItems) -> Job:
        """Put the job together. What another process has read knows nothing of how the request was adjusted."""
        asked, store = self._request, self._store
        job = self._made(made)
        if made.plan:
            plan = compaction.decode_plan(made.plan)
            job.generation = CompactingGeneration.of(job, plan, writer_of(job), self.answer_compacted)
        kept_in = store if job.reply.is_kept else None
        is_alone = self._conversations is None and (kept_in is None or self._turns is not None)
        last = self._last if is_alone else None
        if kept_in is not None or self._conversations is not None or last is not None:
            job.keeper = ResponseRecorder(
                store=kept_in,
                owner=self.owner,
                response_id=self.response_id,
                items=made.items,
                conversation="" if asked.conversation is None else asked.conversation.id,
                conversations=self._conversations,
                last=last,
                turns=self._turns or [],
            )
        return job

    def _made(self, made: ReadItems) -> Job:
        if made.request is None:
            raise ValueError("a response needs a request")
        keeps = made.request.keeps if self._store is not None and self._request.store is not False else None
        request = replace(made.request, priority=self._request.priority or 0, keeps=keeps)
        return make_job(self.state, ROUTE, [request], is_rendered=True, reply_id=self.response_id)

    async def answer_compacted(self, encrypted_content: str) -> Job:
        """Prepare the answer to what has been compacted: the request again, whose input is the compaction item.

        Raises:
            RequestError: See `begin`.
            ServiceError: See `begin`.
        """
        item = {"type": "compaction", "encrypted_content": encrypted_content}
        gone = {"context_management": None, "previous_response_id": None, "conversation": None}
        asked = self._request.model_copy(update={"input": [item], **gone})
        fields = self._request.model_dump(mode="json", exclude_unset=True, by_alias=True, exclude={"input"})
        raw = msgspec.json.encode({**fields, **gone, "input": [item]})
        made: ReadItems | None = None
        if not self.state.bodies.takes(len(raw)):
            read_prompt, text = prompt.read_prompt, self.state.text
            with suppress(InlineCostError):
                made = await asyncio.to_thread(read_prompt, text, asked, self.response_id, ReferencedItems())
        if made is None:
            nothing = given(ReferencedItems())
            outcome = await self.state.bodies.run(
                RESPONSES, raw, owner=self.owner, context=self.response_id, answer=nothing
            )
            made = await asyncio.to_thread(read_items, outcome)
        return await asyncio.to_thread(self._made, made)


async def open_store(state: ReadingContext, request: ResponsesRequest, *, refers: bool) -> ResponseStore | None:
    """Return the store where the request needs it, or wants it.

    Args:
        state: The server's.
        request: The request.
        refers: It names stored items, or a stored response that it continues.

    Raises:
        RequestError: It asks to be stored, and this server stores nothing.
        ServiceError: It needs the store, which cannot be used now.
    """
    is_off = state.settings.max_stored_responses == 0
    if is_off and request.conversation is not None:
        raise errors.unsupported("conversation", "this server stores none (--max-stored-responses 0); send the items")
    if is_off and (request.store or request.background):
        name = "store" if request.store else "background"
        raise errors.unsupported(name, "this server stores no responses (--max-stored-responses 0)")
    needs = bool(request.store or request.background or refers)
    if not needs and (is_off or request.store is False):
        return None
    try:
        store = await state.stored_responses()
        if request.store:
            await store.check_writable()
        return store
    except errors.ServiceError as error:
        if needs:
            raise
        logger.warning("A response is not stored, for the store cannot be used: %s", error)
        return None


def not_background(response_id: str) -> RequestError:
    """Return the error for cancelling a response that somebody waits for."""
    text = f"{response_id!r} is no background response; close the connection to end it"
    return RequestError(text, param="response_id", code="invalid_value")
