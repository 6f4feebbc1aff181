"""The result of a batch's line: as it is written, and what it adds to the batch."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import msgspec

from dovetail_server import errors
from dovetail_server.error_body import ErrorBody
from dovetail_server.http.json_lines import one_line


class Cached(msgspec.Struct):
    """Part of `usage`."""

    cached_tokens: int = 0


class Reasoned(msgspec.Struct):
    """Part of `usage`."""

    reasoning_tokens: int = 0
    thinking_tokens: int = 0


class ReplyUsage(msgspec.Struct):
    """The part of a reply's `usage` that batches sum up; responses and messages have other names for it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    prompt_tokens_details: Cached | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: Cached | None = None
    output_tokens_details: Reasoned | None = None
    cache_read_input_tokens: int | None = None

    def as_chat(self) -> ReplyUsage:
        """Return it under the names of chat replies."""
        cached = self.cache_read_input_tokens
        if cached is not None:
            thinking = 0 if self.output_tokens_details is None else self.output_tokens_details.thinking_tokens
            return ReplyUsage(self.input_tokens + cached, self.output_tokens, thinking, Cached(cached))
        if self.input_tokens_details is None or self.output_tokens_details is None:
            return self
        reasoning = self.output_tokens_details.reasoning_tokens
        return ReplyUsage(self.input_tokens, self.output_tokens, reasoning, self.input_tokens_details)


class ReplyHead(msgspec.Struct):
    """The part of a reply that is read back."""

    usage: ReplyUsage


decode_head = msgspec.json.Decoder(ReplyHead).decode
encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Result:
    """A line's result as it is written, and what it adds to the batch."""

    text: bytes
    is_error: bool
    usage: ReplyUsage | None = None


def new_request_id() -> str:
    """Return the identifier of an output line."""
    return f"batch_req_{uuid.uuid4().hex}"


def result_line(custom_id: str, status: int, body: bytes) -> bytes:
    """Write an output line around a reply's body."""
    head = b'{"id":%b,"custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":' % (
        encode(new_request_id()),
        encode(custom_id),
        status,
        encode(f"req_{uuid.uuid4().hex}"),
    )
    return one_line(head + body) + b'},"error":null}\n'


def lost_line(custom_id: str, code: str, message: str) -> bytes:
    """Write the line of a request that got no reply."""
    error = {"code": code, "message": message}
    line = {"id": new_request_id(), "custom_id": custom_id, "response": None, "error": error}
    return one_line(encode(line)) + b"\n"


def refusal(custom_id: str, error: Exception) -> Result:
    """Return the result of a line that was refused or that failed."""
    status, detail, _ = errors.describe(error)
    return Result(result_line(custom_id, status, encode(ErrorBody(detail))), True)
