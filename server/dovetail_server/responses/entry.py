"""Where a Responses request comes in: what it refers to is fetched, then it is prepared."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dovetail.errors import RequestError
from dovetail_server import errors
from dovetail_server.openai.responses import InputTokensRequest, ItemReference, ResponsesRequest
from dovetail_server.responses import translate
from dovetail_server.responses.items import Item, input_items, messages_of, new_response_id
from dovetail_server.responses.keeper import Keeper
from dovetail_server.responses.store import ResponseStore
from dovetail_server.serving.responses import ResponsesJob, prepare
from dovetail_server.serving.translate import fields_named, prompt_tokens

if TYPE_CHECKING:
    from dovetail_server.state import ServerState

logger = logging.getLogger("dovetail.server")
MAX_REFERENCES = 1024
"""Each is looked up in the database."""


async def begin(state: ServerState, request: ResponsesRequest, owner: str) -> ResponsesJob:
    """Check and prepare a request.

    Raises:
        RequestError: It cannot be served as it is, or refers to what is not there.
        ServiceError: What it refers to, or where it must be stored, cannot be reached now.
    """
    model = state.check_model(request.model)
    translate.check(request)
    store = await open_store(state, request)
    response_id = new_response_id()
    before, items = await gather(store, request, owner, response_id)
    keeps = store is not None and request.store is not False and state.settings.max_stored_responses > 0
    keeper = Keeper(store, owner) if keeps and store is not None else None
    return await asyncio.to_thread(
        prepare, state, request, model, response_id=response_id, items=items, before=before, keeper=keeper
    )


async def count(state: ServerState, request: InputTokensRequest, owner: str) -> int:
    """Return the tokens of a response's prompt, nothing left out.

    Raises:
        RequestError: See `begin`.
        ServiceError: See `begin`.
    """
    state.check_model(request.model)
    fields = {name: getattr(request, name) for name in request.model_fields_set}
    asked = ResponsesRequest.model_construct(**fields, store=False)  # all of it was validated, which takes time
    translate.check(asked)
    response_id = new_response_id()
    before, items = await gather(await open_store(state, asked), asked, owner, response_id)

    def run() -> int:
        messages = messages_of([*before, *items], asked.instructions)
        with fields_named(translate.NAMES):
            return prompt_tokens(translate.to_chat(asked, messages, response_id), state.text)

    return await asyncio.to_thread(run)


async def gather(
    store: ResponseStore | None, request: ResponsesRequest, owner: str, response_id: str
) -> tuple[list[Item], list[Item]]:
    """Return the items of the responses that a request continues, and its own, references resolved."""
    before: list[Item] = []
    if request.previous_response_id is not None and store is not None:
        before = await store.chain(owner, request.previous_response_id)
    items = await asyncio.to_thread(input_items, request.input, response_id)
    if sum(item["type"] == "item_reference" for item in items) > MAX_REFERENCES:
        text = f"input holds more than {MAX_REFERENCES} item references; use previous_response_id, or send the items"
        raise RequestError(text, param="input", code="invalid_value")
    if store is not None:
        items = [await resolve(store, owner, item, at) for at, item in enumerate(items)]
    return before, items


async def open_store(state: ServerState, request: ResponsesRequest) -> ResponseStore | None:
    """Return the store where the request needs it, or wants it.

    Raises:
        RequestError: It asks to be stored, and this server stores nothing.
        ServiceError: It needs the store, which cannot be used now.
    """
    is_off = state.settings.max_stored_responses == 0
    if is_off and (request.store or request.background):
        name = "store" if request.store else "background"
        raise errors.unsupported(name, "this server stores no responses (--max-stored-responses 0)")
    refers = not isinstance(request.input, str) and any(isinstance(item, ItemReference) for item in request.input)
    needs = bool(request.store or request.background or request.previous_response_id or refers)
    if not needs and (is_off or request.store is False):
        return None
    try:
        return (await state.storage.get()).responses
    except errors.ServiceError as error:
        if needs:
            raise
        logger.warning("A response is not stored, for the store cannot be used: %s", error)
        return None


async def resolve(store: ResponseStore, owner: str, item: Item, at: int) -> Item:
    """Return an item, or the one that it refers to."""
    if item["type"] != "item_reference":
        return item
    return await store.item(owner, item["id"], f"input[{at}].id")


def not_background(response_id: str) -> RequestError:
    """Return the error for cancelling a response that somebody waits for."""
    text = f"{response_id!r} is no background response; close the connection to end it"
    return RequestError(text, param="response_id", code="invalid_value")
