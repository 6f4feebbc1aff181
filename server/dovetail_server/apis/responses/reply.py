"""`/v1/responses`: from a reply's steps to bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from dovetail.contracts.replies import Failure, Reply, StepView, Writer
from dovetail.contracts.requests import Request
from dovetail_server.apis.dropped import notes_of
from dovetail_server.apis.parts import report_field
from dovetail_server.apis.responses import objects as ro
from dovetail_server.apis.responses.builder import OutputBuilder
from dovetail_server.apis.responses.items import item_id
from dovetail_server.apis.responses.objects import response_usage, sum_of

encode = msgspec.json.Encoder().encode
ENDS: dict[str, type[ro.LifecycleEvent]] = {
    "completed": ro.Completed,
    "incomplete": ro.Incomplete,
    "failed": ro.Failed,
    "cancelled": ro.Failed,
}


class ResponsesWriter(Writer):
    """Writes a response.

    `Request.reply` has `echo`, fields of the response that repeat the request's, and may have: `summarises`, reasoning
    goes out as a summary; `warms`, no output is wanted; `encrypts`, reasoning items carry `encrypted_content`; `calls`
    and `unenforced`, see `ReadTools`; `compacts`, what is generated is the summary of a `compaction` item, which
    `compacted` is told. What the model then answers comes behind `go_on`.
    """

    response: ro.ResponseObject
    """As it is now; its output is there from the end on."""

    def __init__(self, reply: Reply) -> None:
        """Begin without output."""
        super().__init__(reply)
        self._choice = reply.choices[0]
        request, sampling = reply.requests[0], self._choice.sampling
        echo = request.reply["echo"]
        self.response = ro.ResponseObject(
            id=reply.id,
            created_at=reply.created,
            status="queued" if echo["background"] else "in_progress",
            model=reply.model,
            service_tier="default",
            store=reply.is_kept,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            dovetail=notes_of(request),
            **echo,
        )
        self._begun = self.response
        self._builder = self._builder_of(request, [])
        self._is_compacting = request.reply.get("compacts", False)
        self._spent = ro.NO_USAGE
        """What the summary took."""
        self._untold: list[ro.StreamEvent] = []
        self._num_sent = 0
        self._last: Sequence[ro.StreamEvent] | None = None
        """What a stream tells before its last event; None before the end."""

    def _builder_of(self, request: Request, items: list[ro.OutputItem]) -> OutputBuilder:
        return OutputBuilder(
            response_id=self.reply.id,
            tokenizer=self.reply.tokenizer,
            summarises=request.reply.get("summarises", False),
            encrypts=request.reply.get("encrypts", False),
            calls=request.reply.get("calls", {}),
            num_top=None if request.logprobs is None else self._choice.num_top,
            items=items,
        )

    def open(self) -> bytes:
        """Return the events that tell of the response's states before its output."""
        new_events: list[ro.StreamEvent] = [ro.Created(response=self.response)]
        if self.response.status == "queued":
            new_events.append(ro.Queued(response=self.response))
        self.response = replace(self.response, status="in_progress")
        new_events.append(ro.LifecycleEvent(response=self.response))
        if self._is_compacting:
            item = self._compaction("")
            new_events += [ro.ItemAdded(output_index=0, item=item), ro.Compacting(item_id=item.id, output_index=0)]
        return self._written(new_events)

    def step(self, steps: Sequence[StepView]) -> bytes:
        """Return what the steps' events tell of the output."""
        new_events, self._untold = self._untold, []
        if not self._is_compacting:
            new_events += [event for step in steps for event in self._builder.take(step.events, step.visible)]
        return self._written(new_events)

    def take(self, steps: Sequence[StepView]) -> None:
        """Build the output."""
        if not self._is_compacting:
            for step in steps:
                self._builder.take(step.events, step.visible)

    def compacted(self, encrypted_content: str) -> None:
        """Take the item that the summary became."""
        item = self._compaction(encrypted_content)
        self._builder.items.append(item)
        self._untold.append(ro.ItemDone(output_index=0, item=item))

    def _compaction(self, encrypted_content: str) -> ro.CompactionOutput:
        return ro.CompactionOutput(id=item_id(self.reply.id, "compaction", "o", 0), encrypted_content=encrypted_content)

    def go_on(self, reply: Reply) -> None:
        """Write another reply behind what is there: to the conversation that has been compacted."""
        self._spent, self._is_compacting = response_usage(self._choice), False
        self._choice, request = reply.choices[0], reply.requests[0]
        self._builder = self._builder_of(request, self._builder.items)
        self.response = replace(self.response, dovetail=notes_of(request))

    def close(self) -> bytes:
        """Return the events that end what is open, and the whole response."""
        response = self._ended()
        return self._written([*(self._last or ()), ENDS[response.status](response=response)])

    def whole(self) -> bytes:
        """Return the response."""
        return encode(self._ended())

    def fail(self, failure: Failure) -> bool:
        """Have the response failed; it has no output then."""
        self.give_up(ro.ResponseError(code=error_code(failure), message=failure.message))
        self.response.usage = sum_of(self._spent, response_usage(self._choice))
        return True

    def give_up(self, error: ro.ResponseError | None = None) -> None:
        """End the response without output: it failed, or was cancelled where there is no error."""
        status: ro.ResponseStatus = "cancelled" if error is None else "failed"
        self.response, self._last = replace(self._begun, status=status, error=error), ()

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        """Return the only event of a stream that failed before there was a response to tell of."""
        return written(ro.ErrorEvent(code=failure.code, message=failure.message, param=failure.param), 0)

    def _written(self, events: Iterable[ro.StreamEvent]) -> bytes:
        parts = [written(event, number) for number, event in enumerate(events, self._num_sent)]
        self._num_sent += len(parts)
        return b"".join(parts)

    def _ended(self) -> ro.ResponseObject:
        """Return the response, complete if its choice has ended."""
        if self._last is None:
            has_limit = not (self._is_compacting or self.reply.requests[0].reply.get("warms"))
            is_cut = self._choice.finish_reason == "length" and has_limit
            self._last = self._builder.finish("incomplete" if is_cut else "completed")
            self.response = replace(
                self.response,
                status="incomplete" if is_cut else "completed",
                completed_at=None if is_cut else int(time.time()),
                incomplete_details=ro.IncompleteDetails("max_output_tokens") if is_cut else None,
                output=self._builder.items,
                usage=sum_of(self._spent, response_usage(self._choice)),
                structured_output=report_field(self._choice, "parameters"),
            )
        self.response.store = self.reply.is_kept
        return self.response


def error_code(failure: Failure) -> Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]:
    """Return OpenAI's word for an error of this HTTP status and code."""
    if failure.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if failure.status >= 500 or failure.code == "request_aborted" else "invalid_prompt"


def written(event: ro.StreamEvent, number: int) -> bytes:
    """Return an event as it is sent."""
    event.sequence_number = number
    kind = event.__struct_config__.tag
    return b"event: %b\ndata: %b\n\n" % (str(kind).encode(), encode(event))
