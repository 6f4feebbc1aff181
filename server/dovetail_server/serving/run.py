"""Running a job: whatever its API, a stream and a whole reply are made here, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.contracts.replies import Writer
from dovetail_server.errors import catalogue as errors
from dovetail_server.serving.choice import Step
from dovetail_server.serving.common import check_not_aborted
from dovetail_server.serving.job import Job
from dovetail_server.serving.sse import Chunks, goes_on_elsewhere


async def stream(job: Job) -> Chunks:
    """Yield the bytes of a stream, those of one engine step together."""
    writer, source, is_open, is_failed = job.writer, job.generation.steps(), False, False
    try:
        async for steps in source:
            for step in steps:
                if step.is_last:
                    check_not_given_up(job, step)
            data = writer.step(steps) if is_open else writer.open() + writer.step(steps)
            is_open = True
            if data:
                is_failed = True
                yield data
    except Exception as error:
        if not is_failed or goes_on_elsewhere(error) or not writer.fail(errors.failure_of(error)):
            raise
    finally:
        await source.aclose()
    await keep(job)
    if end := writer.close():
        yield end


async def reply(job: Job) -> bytes:
    """Run to the end and return the whole reply."""
    async for steps in job.generation.steps(whole=True):
        for step in steps:
            if step.is_last:
                check_not_given_up(job, step)
        job.writer.take(steps)
    return await keep(job) or await job.generation.finished(job.writer.whole)


async def keep(job: Job) -> bytes:
    """Store the reply where that was asked for, and return it if it was."""
    if job.keeper is None:
        return b""
    body = await job.generation.finished(job.writer.whole)
    job.reply.is_kept = await job.keeper.finish(body, job.reply.model)
    return body if job.reply.is_kept else b""


def check_not_given_up(job: Job, last: Step) -> None:
    """Raise where the engine gave a choice up, unless the API has a word for a reply that ends so.

    Raises:
        DovetailError: Saying why.
    """
    is_lone = len(job.generation.choices) == 1 and not last.choice.num_completion
    if is_lone or not job.writer.reports_aborts:
        check_not_aborted(last.choice)


def ending(writer: type[Writer], request_id: str | None) -> Callable[[Exception], bytes]:
    """Return what writes the end of a stream after an error."""

    def failed(error: Exception) -> bytes:
        return writer.failed(errors.failure_of(error), request_id)

    return failed
