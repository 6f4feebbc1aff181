"""Runs the generation that writes a summary, and behind it the one that answers what has been compacted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.responses import objects as ro
from dovetail_server.apis.responses.compaction import CUT, Plan
from dovetail_server.apis.responses.items import Item, Sealed, decode_items, item_id, seal
from dovetail_server.apis.responses.objects import response_usage
from dovetail_server.errors import catalogue as errors
from dovetail_server.serving.choice import Choice, Step
from dovetail_server.serving.common import check_not_aborted
from dovetail_server.serving.generation import Generation
from dovetail_server.serving.job import Job, make_generation

if TYPE_CHECKING:
    from dovetail.contracts.requests import Request
    from dovetail_server.apis.responses.reply import ResponsesWriter
    from dovetail_server.serving.context import ServingContext

NAMED = "compacting the conversation: "
"""Stands before errors of the summary."""
Answer = Callable[[str], Awaitable[Job]]
"""Makes the job that answers, of a compaction item's `encrypted_content`."""


@dataclass(slots=True, kw_only=True)
class CompactingGeneration(Generation):
    """A summary's generation, and what comes behind it.

    Attributes:
        plan: What becomes of the summary.
        writer: Is told of both.
        answer: See `Answer`.
    """

    plan: Plan
    writer: ResponsesWriter
    answer: Answer

    @classmethod
    def of(cls, job: Job, plan: Plan, writer: ResponsesWriter, answer: Answer) -> CompactingGeneration:
        """Take the place of a job's generation, which is the summary's."""
        given = {one.name: getattr(job.generation, one.name) for one in fields(Generation)}
        given["has_next"] = plan.replaces
        return cls(**given, plan=plan, writer=writer, answer=answer)

    async def steps(self, *, whole: bool = False) -> AsyncGenerator[list[Step], None]:
        """Yield the summary's steps, then those of the answer.

        Raises:
            RequestError: The model wrote no summary, or what it leaves cannot be served.
            ServiceError: See `Generation.steps`.
        """
        try:
            async with aclosing(Generation.steps(self, whole=whole)) as source:
                async for steps in source:
                    for step in steps:
                        if step.is_last:
                            check_not_aborted(step.choice)
                    yield steps
            summary = summary_of(self.choices[0])
        except (RequestError, errors.ServiceError) as error:
            raise named(error) from error
        plan = self.plan
        sealed = seal(Sealed(summary=summary, replaces=plan.replaces, before=plan.before, after=plan.after))
        self.writer.compacted(sealed)
        yield []
        if not plan.replaces:
            return
        job = await self.answer(sealed)
        job.generation.follows = True
        self.writer.go_on(job.reply)
        async with aclosing(job.generation.steps(whole=whole)) as source:
            async for steps in source:
                yield steps


def summary_of(choice: Choice) -> str:
    """Return the summary that a choice wrote.

    Raises:
        RequestError: It wrote none.
    """
    summary = (choice.output.content or "").strip()
    if not summary:
        text = "the model wrote no summary; send the items as they are, or use truncation: auto"
        raise RequestError(text, code="no_summary", status=500)
    return summary + CUT if choice.finish_reason == "length" else summary


def named(error: RequestError | errors.ServiceError) -> Exception:
    """Return an error that says what was done when it came; what sends a stream elsewhere stays as it is."""
    text = NAMED + error.message
    if isinstance(error, RequestError):
        return RequestError(text, param=error.param, code=error.code, status=error.status)
    if error.code == errors.DRAINING:
        return error
    return errors.ServiceError(text, code=error.code, status=error.status, retry_after_s=error.retry_after_s)


async def compact(
    state: ServingContext, request: Request | None, stays: bytes, compacted_id: str
) -> ro.CompactedResponse:
    """Return what is left of a conversation: the reply of `POST /v1/responses/compact`.

    Args:
        state: The server's.
        request: For the summary, rendered; None where there is nothing to sum up.
        stays: Items that stay, JSON.
        compacted_id: What the reply is called.

    Raises:
        RequestError: The model wrote no summary.
        ServiceError: The server cannot do it now.
    """
    summary, usage = "", ro.NO_USAGE
    if request is not None:
        generation = await asyncio.to_thread(make_generation, state, [request], compacted_id, "", is_rendered=True)
        try:
            async for _ in generation.steps(whole=True):
                pass  # the choice's output holds it
            choice = generation.choices[0]
            check_not_aborted(choice)
            summary, usage = summary_of(choice), response_usage(choice)
        except (RequestError, errors.ServiceError) as error:
            raise named(error) from error
    last: Item = {"type": "compaction", "id": item_id(compacted_id, "compaction", "o", 0)}
    last["encrypted_content"] = seal(Sealed(summary=summary))
    output = [*decode_items(stays), last]
    return ro.CompactedResponse(id=compacted_id, created_at=int(time.time()), output=output, usage=usage)
