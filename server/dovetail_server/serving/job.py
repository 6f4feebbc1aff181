"""From requests whose bodies have been read to the job that answers them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from dovetail.base.identity import time_ns
from dovetail.contracts.api import Route
from dovetail.contracts.replies import Reply, Writer
from dovetail.contracts.requests import Request
from dovetail.processing.image_parts import ImageIds
from dovetail.processing.input import Preparation
from dovetail.processing.refusals import unsupported, wrong
from dovetail_server.serving.choice import Choice
from dovetail_server.serving.common import choice_rid, new_id, service_of
from dovetail_server.serving.generation import Generation

if TYPE_CHECKING:
    from dovetail.grammar.spec.route import GrammarRoute
    from dovetail_server.serving.context import ServingContext


logger = logging.getLogger("dovetail.server")


class Keeper(Protocol):
    """Where a reply is stored when it has ended."""

    async def finish(self, body: bytes, model: str) -> bool:
        """Store the reply, and return whether that was possible."""
        ...


@dataclass(slots=True, kw_only=True)
class Job:
    """What answers an HTTP request, or a line of a batch."""

    generation: Generation
    reply: Reply
    writer: Writer
    keeper: Keeper | None = None


def make_job(
    state: ServingContext,
    route: Route,
    requests: Sequence[Request],
    *,
    is_rendered: bool = False,
    reply_id: str = "",
) -> Job:
    """Check, render and tokenize what has not been, and put the job together; CPU work.

    Args:
        state: The server's.
        route: Whose writer answers.
        requests: Read by it.
        is_rendered: Another process has made prompts of token ids.
        reply_id: What the reply is called, if it has a name already.

    Raises:
        RequestError: The request cannot be served as it is.
    """
    first = requests[0]
    model = state.check_model(first.model, route.tag)
    reply_id, created = reply_id or new_id(route.id_prefix), time_ns() // 10**9
    if first.dropped:
        check_dropped(state, first)
    generation = make_generation(state, requests, reply_id, route.id_prefix, is_rendered=is_rendered)
    note_unenforced(first, generation.choices[0].route)
    is_kept = first.keeps is not None and state.settings.max_stored_responses > 0
    reply = Reply(
        id=generation.request_id if route.is_named_by_client and not is_kept else reply_id,
        model=model,
        created=created,
        began=generation.began,
        fingerprint=state.fingerprint,
        requests=requests,
        choices=generation.choices,
        tokenizer=state.text.tokenizer,
        sends_usage=state.settings.stream_response_default_include_usage,
        is_kept=is_kept,
    )
    return Job(generation=generation, reply=reply, writer=route.writer(reply))


def note_unenforced(request: Request, route: GrammarRoute | None) -> None:
    """Add to what the reply names as unenforced the preferred grammars of tools that `route` does not hold in full."""
    lost = () if route is None else route.options[0].ignored
    held = () if route is None else route.tools
    full = {tool.name for tool in held if not any(at == tool.place or at.startswith(f"{tool.place}/") for at in lost)}
    for name, place in request.reply.get("preferred", {}).items():
        if name not in full:
            request.reply["unenforced"].append(place)


def check_dropped(state: ServingContext, request: Request) -> None:
    """Refuse a request with tools that the server cannot run, if the operator wants that.

    Raises:
        RequestError: It names the first.
    """
    for tool in request.dropped:
        if state.settings.unservable_tools == "refuse":
            why = "this server runs no tools of its own (--unservable-tools refuse); leave it out"
            raise unsupported(f"{tool.param} {tool.what!r}", why)
        log_dropped(tool.what)


@lru_cache(64)
def log_dropped(what: str) -> None:
    """Tell the operator once of a kind of tool."""
    logger.warning("Tools of type %s are left out of prompts: this server runs none (--unservable-tools).", what)


def make_generation(
    state: ServingContext, requests: Sequence[Request], reply_id: str, id_prefix: str, *, is_rendered: bool = False
) -> Generation:
    """Check, render and tokenize what has not been, and return what the engine runs; CPU work.

    Args:
        state: The server's.
        requests: In order.
        reply_id: What the first is called, if its client did not name it.
        id_prefix: Of what others are called.
        is_rendered: Another process has made prompts of token ids.

    Raises:
        RequestError: A request cannot be served as it is.
    """
    state.check_generated(sum(len(request.prompts) * (request.candidates or request.n) for request in requests))
    choices: list[Choice] = []
    before: Preparation | None = None
    for at, request in enumerate(requests):
        rid = request.rid or (new_id(id_prefix) if at else reply_id)
        before = add_choices(state, request, rid, choices, before, is_rendered=is_rendered)
    if len(requests) > 1 and len({choice.submit.rid for choice in choices}) < len(choices):
        raise wrong("rid is the same for two prompts; give each one of its own, or leave it out", "rid")
    operation = "text_completion" if choices[0].prompt.tail is None else "chat"
    return Generation(state=state, request_id=requests[0].rid or reply_id, choices=choices, operation=operation)


def add_choices(
    state: ServingContext,
    request: Request,
    rid: str,
    choices: list[Choice],
    before: Preparation | None,
    *,
    is_rendered: bool,
) -> Preparation:
    """Add what the engine runs for a request, and return its preparation, which that of the next begins with.

    Raises:
        RequestError: It cannot be served as it is.
    """
    text = state.text
    service = service_of(request.priority, request.cache_salt)
    per_prompt = request.candidates or request.n
    has_one_call = request.tools is not None and not request.tools.parallel
    count = len(request.prompts) * per_prompt
    names = [choice_rid(rid, at, count) for at in range(count)]
    preparation = Preparation(text, request) if before is None else before.beside(request)
    if not is_rendered:
        request = preparation.rendered(keeps=not service["cache_salt"])
    first, first_prompt = len(choices), choices[-1].prompt_index + 1 if choices else 0
    for p, prompt in enumerate(preparation.prompts):
        prepared = preparation.ready(prompt)
        media = prompt.media if isinstance(prompt, ImageIds) else ()
        for k in range(per_prompt):
            at = len(choices)
            choices.append(
                Choice(
                    index=at,
                    submit=prepared.submit(names[at - first], prompt.ids, k, media=media, **service),
                    output=prepared.output(text, track_offsets=request.tracks_offsets),
                    request=request,
                    prompt=prompt,
                    prompt_index=first_prompt + p,
                    route=prepared.constraints.route,
                    has_one_call=has_one_call,
                    is_dropped=request.limit == 0,
                )
            )
    return preparation
