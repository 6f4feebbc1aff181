"""The result of a batch's line: as it is written, and what it adds to the batch."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

import msgspec

from dovetail.contracts.api import Api
from dovetail.contracts.replies import Failure, Tokens
from dovetail_server.errors import catalogue as errors
from dovetail_server.errors.body import ErrorBody
from dovetail_server.http.api_errors import failure_reply
from dovetail_server.http.json_lines import one_line


class Cached(msgspec.Struct):
    """Part of `usage`."""

    cached_tokens: int = 0


class LineUsage(msgspec.Struct):
    """What batches sum up; of replies that generate nothing, the part of `usage` that says it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    prompt_tokens_details: Cached | None = None

    @classmethod
    def of(cls, tokens: Tokens) -> LineUsage:
        """Return what a reply counted."""
        return cls(tokens.prompt, tokens.completion, tokens.reasoning, Cached(tokens.cached))


class ReplyHead(msgspec.Struct):
    """The part of a reply that is read back."""

    usage: LineUsage


decode_head = msgspec.json.Decoder(ReplyHead).decode
encode = msgspec.json.encode
logger = logging.getLogger("dovetail.server")


@dataclass(frozen=True, slots=True)
class Result:
    """A line's result as it is written, and what it adds to the batch."""

    text: bytes
    is_error: bool
    usage: LineUsage | None = None


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


def refusal(custom_id: str, error: Exception, api: Api | None = None) -> Result:
    """Return the result of a line that was refused or that failed, in the words of the API that owns its path."""
    status, detail, _ = errors.describe(error)
    body = encode(ErrorBody(detail))
    if api is not None:
        failure = Failure(status, detail.message, detail.type, detail.param, detail.code)
        try:
            status, body = failure_reply(api, failure, None)
        except Exception:
            # A stranger's code, as of `ApiErrors`.
            logger.exception("%s.failed() cannot tell of an error", api)
    return Result(result_line(custom_id, status, body), True)
