"""The address of an application: the layers of every server, the choice of the model, and a stream's move.

Ray's proxy runs this as an ASGI application. A request for a text goes to a replica of its model, chosen by Ray. When
that replica ends, another one gets the request; of a stream it gets what the client has, and goes on behind it, as
behind `dovetail gateway`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.contracts.errors import EngineError, RequestError
from dovetail_server.errors import catalogue as errors
from dovetail_server.gateway.client_response import HOP
from dovetail_server.http.addresses import DEPLOYMENT
from dovetail_server.http.journal import JOURNAL_HEADER, KEY_HEADER, PATH, end_of
from dovetail_server.ray.call import ProxiedRequest, ResponseHead
from dovetail_server.relay.places import RelayState
from dovetail_server.relay.replies import STILL, CutError, Pieces, RelayedStream, pass_whole
from dovetail_server.routes.health import answer, probe_routes
from dovetail_server.schema.models import DEFAULT_MODEL
from dovetail_server.serving.served import check_deployment
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start.app import make_relay_app

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("dovetail.server")
EVERYWHERE = frozenset(
    ("/metrics", "/loads", "/v1/loads", "/flush_cache", "/abort_request", "/start_profile", "/stop_profile")
)
"""Routes that mean every replica, or a certain one: Ray gives a request to one of its choice."""
DROPPED = HOP | {"origin", "sec-fetch-site"}
"""Headers that are this address's, or that say whose page asked, which was looked at here."""
NO_HOST = (b"host", b"localhost")


class ModelField(msgspec.Struct):
    """The field that chooses the model; others are the replica's to check."""

    model: Any = None


named = msgspec.json.Decoder(ModelField).decode


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """A model as the front knows it: the deployment, and what requests may call it."""

    deployment: str
    names: list[str]


class FrontState(RelayState):
    """What the layers and the relay share. Used from one event loop."""

    def __init__(self, settings: ServeSettings, models: Sequence[DeployedModel], resume_key: str) -> None:
        """Hold nothing yet."""
        super().__init__(settings)
        self.models = models
        self.resume_key = resume_key
        self._handles: dict[str, DeploymentHandle[Any]] = {}

    def handle(self, served: DeployedModel) -> Any:
        """Return Ray's handle of a model's replicas, whose calls give a stream."""
        found = self._handles.get(served.deployment)
        if found is None:
            from ray import serve

            found = serve.get_deployment_handle(served.deployment).options(method_name="relay", stream=True)
            self._handles[served.deployment] = found
        return found

    def model_of(self, body: bytes) -> DeployedModel:
        """Return the model that a body names.

        Raises:
            RequestError: It names none of several, or one that is not here.
        """
        names = [name for served in self.models for name in served.names]
        check_deployment(names)
        if len(self.models) == 1:
            return self.models[0]  # the replica says what is wrong with a name
        name = DEPLOYMENT.get()
        try:
            name = name or (named(body).model if body else None)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return self.models[0]  # which says what is wrong with the body
        if name is None or name == DEFAULT_MODEL:
            raise RequestError(f"model is missing; served: {', '.join(names)}", param="model", code="missing_field")
        for served in self.models:
            if name in served.names:
                return served
        raise errors.model_not_found(str(name)[:128], names)


class Front:
    """The ASGI application, built where it runs: what travels there is settings and names."""

    def __init__(self, values: dict[str, Any], models: Sequence[DeployedModel], resume_key: str) -> None:
        """Note what it is to serve."""
        self.values, self.models, self.resume_key = values, list(models), resume_key
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._app is None:
            self._app = create_app(FrontState(ServeSettings(**self.values), self.models, self.resume_key))

        async def send_unnamed(message: Message) -> None:
            if message["type"] == "http.response.start":  # Ray's proxy names requests, and adds the name to the reply
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await self._app(scope, receive, send_unnamed)


def create_app(state: FrontState) -> Starlette:
    """Build the application."""
    relay = RayRelay(state)
    own = [*probe_routes(relay.ready), Route("/v1/models", relay.list_models, methods=["GET"])]
    return make_relay_app(state, own, relay, {})


class RayRelay:
    """Gives requests to replicas."""

    def __init__(self, state: FrontState) -> None:
        """Relay for `state`."""
        self.state = state

    async def ready(self, request: Request) -> Response:
        """Whether every model has a replica that answers and is ready."""
        for served in self.state.models:
            head, _ = await self._whole(served, self._call(request, b"", "/readyz"))
            if head.status != 200:
                return answer(f"{served.names[0]}: no replica is ready")
        return answer(None)

    async def list_models(self, request: Request) -> Response:
        """Put the models' lists together."""
        rows: list[Any] = []
        for served in self.state.models:
            head, body = await self._whole(served, self._call(request, b"", "/v1/models"))
            if head.status != 200:
                return Response(body, head.status, media_type="application/json")
            rows += msgspec.json.decode(body)["data"]
        return Response(msgspec.json.encode({"object": "list", "data": rows}), media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            RequestError: The route cannot be had here, or the model is none of those served.
            ServiceError: No replica answers.
            ClientGoneError: Nobody reads the reply.
        """
        if scope["type"] == "websocket":
            await errors.refuse_websocket(errors.no_websocket(scope["path"]), scope, receive, send)
            return
        if scope["path"] in EVERYWHERE or scope["path"] == PATH:
            text = f"{scope['path']} is not served under Ray, which gives a request to one replica of its own choice"
            raise RequestError(f"{text}; Ray's own metrics tell the load of each", code="unsupported_route", status=404)
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            raise errors.ClientGoneError("the client left before the end of its request") from None
        served = self.state.model_of(body) if request.method == "POST" else self._by_path(scope["path"])
        prompt = self.state.places.prompt(scope["path"], body)
        call = self._call(request, body, prompt=prompt)
        await self._deliver(served, call, send)

    def _by_path(self, path: str) -> DeployedModel:
        """Return the model that a path names, or the first: all keep files in one place."""
        name = path.removeprefix("/v1/models/")
        return next((served for served in self.state.models if name in served.names), self.state.models[0])

    def _call(
        self, request: Request, body: bytes, path: str | None = None, prompt: str | None = None
    ) -> ProxiedRequest:
        headers = [(n, v) for n, v in request.scope["headers"] if n.decode("latin-1") not in DROPPED]
        headers += [NO_HOST, (b"x-request-id", request.scope["state"]["request_id"].encode())]
        if prompt is not None and self.state.places.resumes(path or request.scope["path"]):
            headers.append((KEY_HEADER.encode(), self.state.resume_key.encode()))
        query = request.scope["query_string"]
        return ProxiedRequest(request.method, path or request.scope["path"], query, headers, body, prompt)

    async def _whole(self, served: DeployedModel, call: ProxiedRequest) -> tuple[ResponseHead, bytes]:
        """Return a small reply."""
        pieces = ReplicaReply(self.state.handle(served), call)
        try:
            return await pieces.head(), b"".join([piece async for piece in pieces.body()])
        except CutError as error:
            raise lost(str(error)) from None
        finally:
            pieces.close()

    async def _deliver(self, served: DeployedModel, call: ProxiedRequest, send: Send) -> None:
        """Give a request to a replica, and to another one where that one ends before it has answered.

        Raises:
            ServiceError: Several ended on it.
        """
        for _ in range(STILL + 1):
            pieces = ReplicaReply(self.state.handle(served), call)
            try:
                head = await pieces.head()
                if call.prompt is not None and is_stream(head):
                    await ReplicaStream(self.state, served, call, send).run(head, pieces)
                else:
                    await send_whole(self.state, head, pieces, send, is_asked_again=call.prompt is not None)
                return
            except CutError as error:
                if call.prompt is None and call.method != "GET":
                    raise lost(str(error)) from None  # it may have been done
                logger.warning("A replica of %s ended (%s); another one gets its request.", served.names[0], error)
            finally:
                pieces.close()
        raise lost(f"{STILL + 1} replicas ended while they had this request")


class ReplicaReply:
    """A replica's reply as it comes; closing it tells the replica that nobody reads it."""

    def __init__(self, handle: Any, call: ProxiedRequest) -> None:
        """Ask. Ray's router sees positional arguments only: a call without a prompt has none."""
        self._reply = handle.remote(call) if call.prompt else handle.remote(call=call)

    async def head(self) -> ResponseHead:
        """Return the reply's head.

        Raises:
            CutError: The replica ended.
        """
        found = await self._next()
        if not isinstance(found, ResponseHead):
            raise CutError("it sent no reply")
        return found

    async def body(self) -> Any:
        """Yield the pieces of its body.

        Raises:
            CutError: The replica ended before.
        """
        while (piece := await self._next()) is not None:
            yield piece

    async def _next(self) -> Any:
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            return await anext(self._reply)
        except StopAsyncIteration:
            return None
        except (RayError, RayServeException) as error:
            raise CutError(str(error).strip().splitlines()[0][:200] or type(error).__name__) from None

    def close(self) -> None:
        """End the request if it has not ended."""
        self._reply.cancel()


class ReplicaStream(RelayedStream):
    """One stream, on its way from one replica after the other to its client."""

    def __init__(self, state: FrontState, served: DeployedModel, call: ProxiedRequest, send: Send) -> None:
        """Begin."""
        request_id = dict(call.headers)[b"x-request-id"].decode()
        super().__init__(state, state.places, call.path, call.body, request_id)
        self.state, self.served, self.call, self._send = state, served, call, send

    async def run(self, head: ResponseHead, pieces: ReplicaReply) -> None:
        """Send a reply's events, and those that another replica makes where this one ends."""
        await self._send(start(head))
        await self.pass_on(self._pieces(pieces), header(head, JOURNAL_HEADER), header(head, "content-type") or "")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(self, data: bytes) -> None:
        """Send a piece."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def lost(self, why: str) -> str:
        """Name the model: Ray knows its replicas."""
        return self.served.names[0]

    async def another(self) -> Pieces | str:
        """Ask again, of a replica that Ray chooses."""
        call = self.call
        again = ProxiedRequest("POST", PATH, call.query, call.headers, self.kept.resume_body(), call.prompt)
        return self._pieces(ReplicaReply(self.state.handle(self.served), again))

    async def _pieces(self, pieces: ReplicaReply) -> Pieces:
        """Yield what the replica sends.

        Raises:
            CutError: It ended, or does not go on.
        """
        try:
            async for piece in pieces.body():
                if not isinstance(piece, ResponseHead):
                    yield piece
                elif piece.status != 200:
                    self.kept.name = None if piece.status != 503 else self.kept.name
                    raise CutError(f"another replica answers {piece.status}")
        finally:
            pieces.close()


def header(head: ResponseHead, wanted: str) -> str | None:
    """Return a header of a reply."""
    return next((v.decode("latin-1") for n, v in head.headers if n.decode("latin-1").lower() == wanted), None)


def is_stream(head: ResponseHead) -> bool:
    """Whether a reply is a stream with a journal."""
    return header(head, JOURNAL_HEADER) is not None and end_of(header(head, "content-type") or "") is not None


def start(head: ResponseHead) -> dict[str, Any]:
    """Return the message that begins a reply to the client."""
    headers = [(n.lower(), v) for n, v in head.headers if n.lower().decode("latin-1") not in HOP or is_length(n)]
    return {"type": "http.response.start", "status": head.status, "headers": headers}


def is_length(name: bytes) -> bool:
    """Whether a header is the length of a body, which is passed on as it is."""
    return name.lower() == b"content-length"


async def send_whole(
    state: FrontState, head: ResponseHead, pieces: ReplicaReply, send: Send, *, is_asked_again: bool
) -> None:
    """Send a reply as it comes; one that can be asked for again is held until it is whole, or too large for that."""
    has_begun = False

    async def begin() -> None:
        nonlocal has_begun
        await send(start(head))
        has_begun = True

    async def pass_on(piece: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": more})

    is_held = is_asked_again and end_of(header(head, "content-type") or "") is None  # a stream may last
    try:
        await pass_whole(state, pieces.body(), begin, pass_on, is_held=is_held)
    except CutError as error:
        if not has_begun:
            raise
        raise EngineError(f"the reply broke off: {error}") from None  # it has begun: the connection ends
    await pass_on(b"", more=False)


def lost(why: str) -> errors.ServiceError:
    """Return the error of a request that no replica answered."""
    return errors.ServiceError(f"{why}; try again", code="no_worker", retry_after_s=1)
