"""One job: a body is parsed, checked, and made into prompts or a reply."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from dovetail.base.panics import is_panic
from dovetail.contracts.api import Route
from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.requests import Chat, Request
from dovetail.processing.input import Preparation
from dovetail.processing.processor import Processor
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.apis.responses.references import ReferencedItems
from dovetail_server.apis.responses.request import ReadItems
from dovetail_server.errors.catalogue import PLUGIN_FAILED
from dovetail_server.reading.parse import check_name, decoded, requests_of, validated
from dovetail_server.reading.tasks import TASKS, BodyContext, RawTask
from dovetail_server.reading.wire import IMAGES, BodyJob, BodyResult, PromptBegun, Question, Refusal, packed, too_costly
from dovetail_server.schema.batches import decode_line
from dovetail_server.serving.served import Served

ReferenceLookup = Callable[[Question], ReferencedItems]
Begun = Callable[[list[int], int], None]
TOKENIZER = Tokenizer.__module__
MOST_EARLY = 1 << 16
"""Tokens of a beginning at most: while the engine computes so many, the rest of any prompt is tokenized."""
LOADER = "dovetail_server.media.loader"
"""Loaded only where the model sees."""


def read_line(raw: bytes) -> bytes:
    """Return the body in a batch's line.

    Raises:
        RequestError: It is not what it was when the batch was created.
    """
    try:
        return bytes(decode_line(raw).body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the line cannot be read: {error}", code="invalid_json") from None


def do(
    job: BodyJob,
    take: Callable[[], bytes],
    text: Processor,
    served: Served,
    ask: ReferenceLookup,
    send: Callable[[PromptBegun], None] | None = None,
) -> BodyResult:
    """Do a job; whatever goes wrong is in the outcome.

    Args:
        job: What to do.
        take: Gives the body away, so that it is not kept beside what it becomes.
        text: Tokenizer, template and parsers.
        served: The names of the model.
        ask: Gets what a response refers to.
        send: Takes the beginnings of a long prompt as they are known; None: nobody waits for them.
    """
    try:
        return _do(job, take, text, served, ask, send)
    except RequestError as error:
        refusal = Refusal(message=error.message, param=error.param, code=error.code, status=error.status)
        return BodyResult(refusal=refusal)
    except PluginError as error:
        refusal = Refusal(message=str(error), param=None, code=PLUGIN_FAILED, status=500)
        return BodyResult(refusal=refusal, fault=traceback.format_exc() if error.__cause__ else None)
    except MemoryError as error:
        return BodyResult(refusal=too_costly("memory", job.num_bytes, part_of(error)))
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        return BodyResult(fault=traceback.format_exc())


def _rendered(text: Processor, request: Request, job: BodyJob) -> Request:
    return Preparation(text, request).rendered(keeps=job.keeps and not request.cache_salt)


def _begun(text: Processor, requests: list[Request], send: Callable[[PromptBegun], None]) -> Begun | None:
    """Return what takes the first tokens of the one prompt that the engine gets; None where they may be others."""
    request, prompt = requests[0], requests[0].prompts[0]
    if len(requests) > 1 or len(request.prompts) > 1 or request.cut is not None:
        return None
    if request.prompt_logprobs is not None:
        return None  # then all of it is computed, whatever is cached
    if prompt.drops_turns if isinstance(prompt, Chat) else prompt.suffix or prompt.images:
        return None
    most, num_sent, began = min(MOST_EARLY, text.limits.context_len - 1), 0, time.perf_counter()

    def begun(ids: list[int], num_about: int) -> None:
        nonlocal num_sent
        if num_sent < len(ids) <= most:
            new, took_s = packed(ids[num_sent:]), time.perf_counter() - began
            send(PromptBegun(new, num_about, took_s, request.priority, request.cache_salt))
            num_sent = len(ids)

    return begun


def part_of(error: BaseException) -> str | None:
    """Return what was at work when an error came: a model's file, of `PARTS`, or `IMAGES`; None if neither was."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == "<template>":
            return "chat template"
        if frame.f_globals.get("__name__") == LOADER:
            return IMAGES
        if frame.f_globals.get("__name__") == TOKENIZER:
            return "tokenizer"
    return None


def _do(
    job: BodyJob,
    take: Callable[[], bytes],
    text: Processor,
    served: Served,
    ask: ReferenceLookup,
    send: Callable[[PromptBegun], None] | None,
) -> BodyResult:
    task = TASKS[job.task]
    if isinstance(task, RawTask):
        return BodyResult(reply=task.run(take(), served))
    data: Any = decoded(read_line(take()) if job.is_line else take())
    if isinstance(task, Route):
        requests = requests_of(data, task)
        del data
        served.name(requests[0].model, task.tag)
        text.begun = None if send is None or job.is_line else _begun(text, requests, send)
        try:
            return BodyResult.of_requests([_rendered(text, requests.pop(0), job) for _ in range(len(requests))])
        finally:
            text.begun = None
    request = validated(data, task.model)
    check_name(request, served, task.tag)
    beside = task.beside(data)
    del data

    def ask_for(references: list[tuple[str, int]]) -> ReferencedItems:
        return ask(Question(light=task.light(beside), references=references))

    made = task.run(BodyContext(text=text, request=request, context=job.context, ask=ask_for))
    if isinstance(made, bytes):
        return BodyResult(reply=made)
    if isinstance(made, ReadItems):
        requests = [] if made.request is None else [made.request]
        return BodyResult.of_requests(requests, light=task.light(beside), items=made.items, plan=made.plan)
    return BodyResult.of(made, task.light(beside))
