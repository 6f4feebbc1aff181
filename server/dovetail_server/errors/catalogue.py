"""The catalogue of errors that clients see, and how each becomes an HTTP reply.

`RequestError` (from the framework) is a 4xx; the two classes here are what is not the request's fault. Tracebacks go to
the log, never into a reply.
"""

from __future__ import annotations

import difflib
import logging
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.contracts.errors import DovetailError, EngineDeadError, PluginError, RequestError, brief
from dovetail.contracts.replies import Failure
from dovetail.grammar.spec.refusals import LATER, OWNER_FULL
from dovetail.messages import OUT_OF_MEMORY, POISON
from dovetail.processing.refusals import input_too_long as input_too_long
from dovetail.processing.refusals import prompt_too_long as prompt_too_long
from dovetail.processing.refusals import unsupported as unsupported
from dovetail_server.compat.endpoints import why_not
from dovetail_server.compat.fields import ELSEWHERE, ours, refusal
from dovetail_server.errors.body import ErrorBody, ErrorDetail

logger = logging.getLogger("dovetail.server")

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}


class ServiceError(DovetailError):
    """The server cannot take the request now; the same request may succeed later.

    `detail`, which may name folders and other servers, is for the log and for admins.
    """

    def __init__(
        self, message: str, *, code: str, status: int = 503, retry_after_s: int | None = None, detail: str = ""
    ) -> None:
        super().__init__(f"{message}: {detail}" if detail else message)
        self.message = brief(message)
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


class ClientGoneError(DovetailError):
    """The client closed the connection and does not read the reply."""


def _overload(text: str) -> ServiceError:
    return ServiceError(f"{text}; try again later", code="queue_full", status=429, retry_after_s=1)


def queue_full(limit: int) -> ServiceError:
    """More requests than may run and wait."""
    return _overload(f"the server already holds {limit} requests, its limit, set by --max-queued-requests")


def queue_full_tokens(limit: int) -> ServiceError:
    """The prompts that run and wait leave no room for this one."""
    return _overload(f"the prompts held already leave no room below {limit} tokens, set by --max-queued-tokens")


def queue_full_bytes(limit: int) -> ServiceError:
    """The bodies that are held leave no room for this one."""
    return _overload(f"the request bodies held already leave no room below {limit} bytes, set by --max-queued-bytes")


def starting() -> ServiceError:
    """The engine is not up yet."""
    return ServiceError(
        "the model is still loading; GET /readyz tells when it is ready", code="starting", retry_after_s=2
    )


DRAINING, PLUGIN_FAILED = "draining", "plugin_failed"


def draining() -> ServiceError:
    """The server was told to stop."""
    return ServiceError("the server is shutting down and takes no new requests", code=DRAINING, retry_after_s=5)


def expired() -> ServiceError:
    """Return the error for a request that exceeded its client's time limit."""
    return ServiceError("the request took longer than its header x-request-timeout allows", code="timeout", status=504)


def aborted(message: str | None, code: str | None = None, param: str | None = None) -> DovetailError:
    """Return the error for a request that was aborted (not worth a retry, so a 400), by a caller or by the engine.

    Args:
        message: The engine's reason.
        code: Set by the engine where the request itself is at fault.
        param: The field at fault.
    """
    if code in LATER or code == OUT_OF_MEMORY:
        status = 429 if code == OWNER_FULL else 503
        return ServiceError(message or "the server is busy", code=code, status=status, retry_after_s=2)
    if code == POISON:
        return RequestError(message or "the engine died of the request", code=code, status=500)
    if code is not None:
        return RequestError(message or "the request cannot be served", param=param, code=code)
    if message in (None, "aborted"):
        return RequestError("the request was aborted", code="request_aborted")
    return ServiceError(f"the engine gave the request up: {message}", code="request_failed", status=500)


def model_not_found(name: str, served: list[str]) -> RequestError:
    """The `model` field names something else."""
    text = f"the model {name!r} does not exist here; served: {', '.join(served)}"
    return RequestError(text, param="model", code="model_not_found", status=404)


def no_websocket(path: str) -> RequestError:
    """A WebSocket was asked for where none is."""
    why = why_not(path) or "send an HTTP request, whose reply comes as events with stream: true"
    if path == "/v1/responses":  # a gateway's, or that of a server without the library
        why = f"a server with dovetail-llm[websocket] serves one, a gateway does not; {why}"
    return RequestError(f"no WebSocket is served at {shortened(path)}: {why}", code="websocket_not_served", status=404)


async def refuse_websocket(error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the request for a WebSocket with an error; where the server in front has no way to, by a bare close."""
    if "websocket.http.response" in scope.get("extensions", {}):
        await to_reply(error)(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": describe(error)[1].code or ""})


def reply(status: int, detail: ErrorDetail, headers: Mapping[str, str] | None = None) -> Response:
    """Build the HTTP reply of an error."""
    body = msgspec.json.encode(ErrorBody(detail))
    return Response(body, status, headers=dict(headers or {}), media_type="application/json")


def describe(error: BaseException) -> tuple[int, ErrorDetail, dict[str, str]]:
    """Return status, body and headers for an error; what is not ours is logged and becomes a 500 with an id."""
    if isinstance(error, RequestError):
        kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
        return error.status, ErrorDetail(message=error.message, type=kind, param=error.param, code=error.code), {}
    if isinstance(error, ServiceError):
        headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
        if error.code == DRAINING:
            headers["connection"] = "close"  # so that nothing more is sent on a connection that is about to end
        kind = TYPES.get(error.status, "server_error")
        return error.status, ErrorDetail(message=error.message, type=kind, code=error.code), headers
    if isinstance(error, EngineDeadError):
        text = "the engine is gone; the server's log says why"
        return 503, ErrorDetail(message=text, type="server_error", code="engine_dead"), {"retry-after": "5"}
    if isinstance(error, PluginError):
        logger.error("request failed: %s", error, exc_info=error.__cause__)
        return 500, ErrorDetail(message=str(error), type="server_error", code=PLUGIN_FAILED), {}
    incident = uuid.uuid4().hex[:12]
    logger.error("request failed, error id %s", incident, exc_info=error)
    text = f"internal error {incident}; the server's log has the details under this id"
    return 500, ErrorDetail(message=text, type="server_error", code="internal_error"), {}


def failure_of(error: BaseException) -> Failure:
    """Return an error as APIs receive it."""
    status, detail, _ = describe(error)
    return Failure(status=status, message=detail.message, kind=detail.type, param=detail.param, code=detail.code)


def to_reply(error: BaseException, *, is_admin: bool = False) -> Response:
    """Build the HTTP reply for any exception; admins are told details."""
    status, detail, headers = describe(error)
    if is_admin and isinstance(error, ServiceError):
        detail = msgspec.structs.replace(detail, message=str(error))
    return reply(status, detail, headers)


ALMOST = 0.85
"""Likeness of an unknown name to a field's from which on it is a slip of the pen, and no name of something else."""
OPPOSITES = ({"min", "max"}, {"enable", "disable"}, {"include", "exclude"}, {"first", "last"}, {"start", "end"})
"""Words of names that are alike and mean the contrary."""
MAX_NAMED = 128
"""Characters of a client's name that an error repeats."""


def opposite(name: str, other: str) -> bool:
    """Tell whether two names differ in words that mean the contrary of each other."""
    differing = set(name.split("_")) ^ set(other.split("_"))
    return any(words <= differing for words in OPPOSITES)


def shortened(name: str) -> str:
    """Return what a client wrote as an error names it: as it is, or its beginning."""
    return name if len(name) <= MAX_NAMED else f"{name[:MAX_NAMED]}…"


def from_validation(error: ValidationError, body: Any, known: list[str]) -> RequestError:
    """Turn pydantic's findings into one sentence about the field that is most deeply wrong.

    Args:
        error: What pydantic found, of a `FailFastModel`: few findings, whatever the body's size.
        body: The decoded JSON body.
        known: Names of the body's fields, for the nearest name of an unknown one.
    """
    return ValidationReport(error, body, known).request_error()


class ValidationReport:
    """Picks and words one finding of a `ValidationError`."""

    def __init__(self, error: ValidationError, body: Any, known: list[str]) -> None:
        self.known = known
        self.found: dict[str, list[Mapping[str, Any]]] = {}
        self.depths: dict[str, int] = {}
        for item in error.errors(include_url=False, include_context=False):
            steps = self._steps(item["loc"], body, item["type"])
            path = "".join(steps).removeprefix(".")
            self.found.setdefault(path, []).append(item)
            self.depths[path] = len(steps)

    @staticmethod
    def _steps(loc: tuple[int | str, ...], body: Any, kind: str) -> list[str]:
        """Return a location as the client sees it (`.messages`, `[0]`, `.role`), without pydantic's union tags."""
        steps: list[str] = []
        here, is_of_key = body, kind in ("extra_forbidden", "missing")
        for i, step in enumerate(loc):
            is_last = i == len(loc) - 1
            if is_of_key and not is_last and isinstance(here, dict) and not isinstance(here.get(step), dict | list):
                continue  # a union's tag, such as `text`, which a field of the same dict may be called, too
            if isinstance(here, dict) and isinstance(step, str) and (step in here or (is_last and i == 0)):
                steps.append(f".{shortened(step)}")
                here = here.get(step)
            elif isinstance(here, dict) and kind == "missing" and is_last:
                steps.append(f".{step}")
            elif isinstance(here, list) and isinstance(step, int) and step < len(here):
                steps.append(f"[{step}]")
                here = here[step]
        return steps

    def request_error(self) -> RequestError:
        """Word the finding with the deepest path, the first of those; findings at one path are a union's."""
        path = max(self.found, key=self.depths.__getitem__)
        items = self.found[path]
        first = items[0]
        if first["type"] == "missing":
            return RequestError(f"{path} is required{self._meant(path)}", param=path, code="missing_required_parameter")
        if first["type"] == "extra_forbidden":
            return self._unknown(path)
        if not path:
            return RequestError("the body must be a JSON object", code="invalid_type")
        reasons = dict.fromkeys(self._reason(item["msg"]) for item in items)
        wrong_type = all(item["type"].endswith(("_type", "_parsing")) for item in items)
        code = "invalid_type" if wrong_type else "invalid_value"
        return RequestError(f"{path} {' or '.join(reasons)}{self._given(first)}", param=path, code=code)

    def _unknown(self, path: str) -> RequestError:
        if (same := ours(path, self.known)) is not None:
            return unsupported(path, f"on this route {same} says it")
        why = refusal(path.rsplit(".", 1)[-1])
        if why is not None:
            return unsupported(path, why)
        name = path.rsplit(".", 1)[-1]
        near = [
            other for other in difflib.get_close_matches(name, self.known, cutoff=ALMOST) if not opposite(name, other)
        ]
        hint = f"did you mean {near[0]!r}?" if near else ELSEWHERE.get(path, "GET /openapi.json lists the fields")
        return RequestError(f"unknown field {path!r}; {hint}", param=path, code="unknown_parameter")

    def _meant(self, path: str) -> str:
        """Return the unknown field beside a missing one that is nearly of its name, as a question."""
        beside, _, name = path.rpartition(".")
        others = [other for other, items in self.found.items() if items[0]["type"] == "extra_forbidden"]
        names = [other.rpartition(".")[2] for other in others if other.rpartition(".")[0] == beside]
        near = difflib.get_close_matches(name, names, n=1)
        return f"; did you mean it by {near[0]!r}?" if near else ""

    @staticmethod
    def _reason(text: str) -> str:
        text = text.removeprefix("Value error, ").removeprefix("Input ").replace(" after validation", "")
        return text[0].lower() + text[1:] if text else "is not valid"

    @staticmethod
    def _given(item: Mapping[str, Any]) -> str:
        value = item["input"]
        if isinstance(value, (bool, int, float)) or value is None or (isinstance(value, str) and len(value) <= 64):
            return f" (given: {msgspec.json.encode(value).decode() if not isinstance(value, float) else value})"
        return ""
