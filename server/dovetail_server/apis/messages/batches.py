"""`/v1/messages/batches`: the request, the batch as Anthropic's clients read it, and the lines of its results.

A batch of messages is a durable batch whose endpoint is `/v1/messages` (`batches/`), under another name: `msgbatch_…`
for `batch_…`. What it was asked stands in a file of its own, one line per request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import Field

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.messages.errors import error_body, status_of
from dovetail_server.errors.body import ErrorBody, ErrorDetail
from dovetail_server.http.json_lines import one_line
from dovetail_server.schema.common import FreeForm, RequestModel
from dovetail_server.schema.tags import MESSAGES
from dovetail_server.serving.served import Served

if TYPE_CHECKING:
    from sqlalchemy.engine import RowMapping

ENDPOINT = "/v1/messages"
PREFIX, OWN_PREFIX = "msgbatch_", "batch_"
CUSTOM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_ID = 1024
"""Bytes of a `custom_id` as JSON, of which a good one has 66."""
ENDED = ("completed", "failed", "expired", "cancelled")
encode = msgspec.json.Encoder().encode


class MessageBatchEntry(RequestModel):
    """One request; `params` is what `POST /v1/messages` takes."""

    custom_id: Annotated[str, Field(min_length=1, max_length=64, pattern=rf"^{CUSTOM_ID.pattern}$")]
    params: FreeForm


class MessageBatchRequest(RequestModel):
    """Body of `POST /v1/messages/batches`."""

    requests: Annotated[list[MessageBatchEntry], Field(min_length=1, max_length=1 << 20)]


class RawBatchEntry(msgspec.Struct, forbid_unknown_fields=True):
    """As `MessageBatchEntry`, read without looking into `params`, which may be large."""

    custom_id: str
    params: msgspec.Raw


class Unread(msgspec.Struct, forbid_unknown_fields=True):
    """As `RawBatchEntry`, with a name that may be large, too: decoding one of megabytes would hold others up."""

    custom_id: msgspec.Raw
    params: msgspec.Raw


class Incoming(msgspec.Struct, forbid_unknown_fields=True):
    """As `MessageBatchRequest`, read as far as its outermost field."""

    requests: msgspec.Raw


class ModelOnly(msgspec.Struct):
    """The part of `params` that is looked at before the batch is there."""

    model: Any = None


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a batch; until it has ended, all are processing."""

    processing: int
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of messages; times are RFC 3339."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: BatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


class MessageBatchList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of batches, newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `DELETE /v1/messages/batches/{id}`."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class LineResponse(msgspec.Struct):
    """Part of a result line."""

    status_code: int
    body: msgspec.Raw
    request_id: str


class Lost(msgspec.Struct):
    """Part of a result line."""

    code: str


class ResultLine(msgspec.Struct):
    """A line of an output or error file."""

    custom_id: str
    response: LineResponse | None
    error: Lost | None


class BatchLineId(msgspec.Struct):
    """A line of an input file."""

    custom_id: str


decode_name = msgspec.json.Decoder(BatchLineId).decode
decode = msgspec.json.Decoder(Incoming).decode
decode_unread = msgspec.json.Decoder(list[Unread]).decode
decode_id = msgspec.json.Decoder(str).decode
decode_model = msgspec.json.Decoder(ModelOnly).decode
decode_line = msgspec.json.Decoder(ResultLine).decode
decode_error = msgspec.json.Decoder(ErrorBody).decode


def to_lines(raw: bytes, served: Served) -> bytes:
    """Return a body as lines of a batch's input; what is wrong within `params` shows in the results.

    Args:
        raw: The body.
        served: The model's names.

    Raises:
        RequestError: It is no such body, or two requests have one `custom_id`.
    """
    try:
        return b"".join(_checked_lines(_entries(decode(raw).requests), served))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no batch of messages: {error}", param="requests") from None


def _checked_lines(entries: Iterable[RawBatchEntry], served: Served) -> Iterator[bytes]:
    seen: set[str] = set()
    for at, entry in enumerate(entries):
        param = f"requests[{at}].custom_id"
        if not CUSTOM_ID.fullmatch(entry.custom_id):
            text = f"{param} must have 1 to 64 letters, digits, - and _"
            raise RequestError(text, param=param, code="invalid_value")
        if entry.custom_id in seen:
            text = f"{param} {entry.custom_id!r} is there twice"
            raise RequestError(text, param=param, code="duplicate_custom_id")
        seen.add(entry.custom_id)
        _check_params(entry, f"requests[{at}].params", served)
        yield _line(entry)


def count_lines(lines: bytes, most: int) -> int:
    """Return how many requests there are.

    Raises:
        RequestError: None, or more than `most`.
    """
    num = lines.count(b"\n")
    if not 1 <= num <= most:
        text = f"requests must hold 1 to {most} requests (given: {num}; see --max-batch-lines)"
        raise RequestError(text, param="requests", code="invalid_value")
    return num


def _entries(requests: msgspec.Raw) -> Iterator[RawBatchEntry]:
    if not bytes(memoryview(requests)[:1]) == b"[":
        raise msgspec.ValidationError("Expected `array` - at `$.requests`")
    for each in decode_unread(requests):
        yield RawBatchEntry(decode_id(each.custom_id) if len(each.custom_id) <= MAX_ID else "", each.params)


def _check_params(entry: RawBatchEntry, param: str, served: Served) -> None:
    try:
        model = decode_model(entry.params).model
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise RequestError(f"{param} must be an object", param=param, code="invalid_type") from None
    if isinstance(model, str) and not served.takes(model, MESSAGES):
        text = f"{param}.model: the model {model[:128]!r} does not exist here; served: {', '.join(served.names)}"
        raise RequestError(text, param=f"{param}.model", code="model_not_found", status=404)


def _line(entry: RawBatchEntry) -> bytes:
    """Write a request as a line, which ends where its JSON may not."""
    params = bytes(entry.params).replace(b"\n", b" ").replace(b"\r", b" ")
    head = b'{"custom_id":%b,"method":"POST","url":"%b","body":' % (encode(entry.custom_id), ENDPOINT.encode())
    return head + params + b"}\n"


def own_id(batch_id: str) -> str:
    """Return the name that a batch has here."""
    return OWN_PREFIX + batch_id.removeprefix(PREFIX)


def shown_id(batch_id: str) -> str:
    """Return the name that Anthropic's clients see."""
    return PREFIX + batch_id.removeprefix(OWN_PREFIX)


def missing(batch_id: str) -> RequestError:
    """Return the 404 of a batch."""
    text = f"no batch {batch_id!r} here; GET /v1/messages/batches lists them"
    return RequestError(text, param="message_batch_id", code="batch_not_found", status=404)


def to_message_batch(row: RowMapping, base_url: str) -> MessageBatch:
    """Return a row as Anthropic's clients read it; `base_url` is where this server was asked."""
    status, name = str(row["status"]), shown_id(str(row["id"]))
    has_ended = status in ENDED
    total, done, failed = int(row["num_total"]), int(row["num_completed"]), int(row["num_failed"])
    rest = total - done - failed
    counts = BatchCounts(processing=total)
    if has_ended:
        counts = BatchCounts(
            processing=0,
            succeeded=done,
            errored=failed + (rest if status == "failed" else 0),
            canceled=rest if status == "cancelled" else 0,
            expired=rest if status == "expired" else 0,
        )
    return MessageBatch(
        id=name,
        processing_status="ended" if has_ended else "canceling" if status == "cancelling" else "in_progress",
        request_counts=counts,
        created_at=_when(row["created_at"]) or "",
        expires_at=_when(row["expires_at"]) or "",
        ended_at=_when(row[f"{status}_at"]) if has_ended else None,
        cancel_initiated_at=_when(row["cancelling_at"]),
        results_url=f"{base_url}{ENDPOINT}/batches/{name}/results" if has_ended else None,
    )


def _when(stamp: int | None) -> str | None:
    return None if stamp is None else datetime.fromtimestamp(stamp, UTC).isoformat().replace("+00:00", "Z")


def result_of(raw: bytes) -> bytes:
    """Return a line of an output or error file as a line of Anthropic's results."""
    line = decode_line(raw)
    if line.response is None:
        kind = "expired" if line.error is not None and line.error.code == "batch_expired" else "canceled"
        if line.error is not None and line.error.code not in ("batch_expired", "batch_cancelled"):
            detail = ErrorDetail(message=line.error.code, type="server_error", code=line.error.code)
            return _written(line.custom_id, {"type": "errored", "error": error_body(504, detail, None)})
        return _written(line.custom_id, {"type": kind})
    if line.response.status_code == 200:
        return _written(line.custom_id, {"type": "succeeded", "message": line.response.body})
    detail = decode_error(line.response.body).error
    status = status_of(line.response.status_code, detail.code)
    error_reply = error_body(status, detail, line.response.request_id)
    return _written(line.custom_id, {"type": "errored", "error": error_reply})


def results_of(lines: Sequence[bytes]) -> bytes:
    """As `result_of`, for several lines."""
    return b"".join(map(result_of, lines))


def unbegun_results(status: str, lines: Sequence[bytes]) -> bytes:
    """Return the results of a batch that ended before its first request began; `lines` are those of its input."""
    kind = {"cancelled": "canceled", "expired": "expired"}.get(status, "errored")
    result: dict[str, Any] = {"type": kind}
    if kind == "errored":
        detail = ErrorDetail(message="the file of the batch's requests is gone", type="server_error", code=status)
        result["error"] = error_body(500, detail, None)
    return b"".join(_written(decode_name(line).custom_id, result) for line in lines)


def _written(custom_id: str, result: dict[str, Any]) -> bytes:
    return one_line(encode({"custom_id": custom_id, "result": result})) + b"\n"
