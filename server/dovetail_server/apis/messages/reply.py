"""`/v1/messages`: from a reply's steps to bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from dovetail.contracts.replies import Failure, Reply, StepView, Writer
from dovetail_server.apis.dropped import notes_of
from dovetail_server.apis.messages.blocks import BlockBuilder
from dovetail_server.apis.messages.errors import error_reply
from dovetail_server.apis.messages.schema import (
    AppliedEdits,
    DeltaUsage,
    MessageReply,
    MessageUsage,
    StopReason,
    ThinkingTokens,
)
from dovetail_server.apis.parts import report_field

U = TypeVar("U", bound=DeltaUsage)
encode = msgspec.json.Encoder().encode
SCHEMA = "input_schema"
"""Where a tool's schema stands in the tool."""


class MessagesWriter(Writer):
    """Writes a message.

    `Request.reply` may have `omits`, thinking is sent in its signature only, and `edits`, what was cleared.
    """

    def __init__(self, reply: Reply) -> None:
        """Begin without content."""
        super().__init__(reply)
        self._choice = reply.choices[0]
        given = reply.requests[0].reply
        self._builder = BlockBuilder(given.get("omits", False))
        self._edits = AppliedEdits(given["edits"]) if "edits" in given else msgspec.UNSET

    def open(self) -> bytes:
        """Return the message without its content."""
        return written([{"type": "message_start", "message": self._message((), None, None)}, {"type": "ping"}])

    def step(self, steps: Sequence[StepView]) -> bytes:
        """Return what the steps' events tell of the content."""
        return written([event for step in steps for event in self._builder.take(step.events)])

    def close(self) -> bytes:
        """Return how the message ended."""
        reason, sequence = self._ending()
        report = report_field(self._choice, SCHEMA)
        return written([
            *self._builder.finish(),
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": self._usage(DeltaUsage),
                **({} if isinstance(report, msgspec.UnsetType) else {"structured_output": report}),
                **({} if isinstance(self._edits, msgspec.UnsetType) else {"context_management": self._edits}),
            },
            {"type": "message_stop"},
        ])  # fmt: skip

    def take(self, steps: Sequence[StepView]) -> None:
        """Build the content."""
        for step in steps:
            self._builder.take(step.events)

    def whole(self) -> bytes:
        """Return the message."""
        self._builder.finish()
        return encode(self._message(self._builder.blocks, *self._ending()))

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        """Return an event with the error."""
        _, body = error_reply(failure, request_id)
        return b"event: error\ndata: %b\n\n" % encode(body)

    def _message(self, blocks: Sequence[Any], reason: StopReason | None, sequence: str | None) -> MessageReply:
        return MessageReply(
            id=self.reply.id,
            model=self.reply.model,
            content=list(blocks),
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(MessageUsage),
            context_management=msgspec.UNSET if reason is None else self._edits,
            structured_output=report_field(self._choice, SCHEMA),
            dovetail=notes_of(self.reply.requests[0]),
        )

    def _usage(self, kind: type[U]) -> U:
        tokens = self.reply.tokens
        return kind(
            input_tokens=tokens.prompt - tokens.cached,
            cache_read_input_tokens=tokens.cached,
            output_tokens=tokens.completion,
            output_tokens_details=ThinkingTokens(tokens.reasoning),
        )

    def _ending(self) -> tuple[StopReason, str | None]:
        """Return why it ended, and at which stop sequence."""
        reason, matched = self._choice.finish_reason, self._choice.matched_stop
        if isinstance(matched, str):
            return "stop_sequence", matched
        if reason == "length":
            is_clamped = self._choice.max_tokens < (self.reply.requests[0].limit or 0)
            return "model_context_window_exceeded" if is_clamped else "max_tokens", None
        return "tool_use" if reason == "tool_calls" else "end_turn", None


def written(events: Sequence[dict[str, Any]]) -> bytes:
    """Return events as they are sent."""
    return b"".join([b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)) for event in events])
