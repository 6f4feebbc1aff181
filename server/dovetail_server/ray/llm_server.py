"""Dovetail as an engine of `ray.serve.llm`: `LLMConfig(…, server_cls="dovetail.ray.LLMServer")`.

Ray's own ingress then has the address, the keys and the models' list. It takes its types of requests and replies from
vLLM or SGLang, one of which has to be installed for that (Ray 2.60: `core/configs/openai_api_models.py`); nothing of
either is run. `engine_kwargs` are settings of `dovetail serve`.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from typing import Any

import msgspec

from dovetail.contracts.errors import ConfigError
from dovetail_server.ray.call import ProxiedRequest, ResponseHead
from dovetail_server.ray.options import COMMON, RayModel, RayOptions, actor_options, cluster_nodes, read_model
from dovetail_server.ray.proxy import NO_HOST
from dovetail_server.ray.replica import ReplicaServer

TYPES = "ray.llm._internal.serve.core.configs.openai_api_models"


def types() -> Any:
    """Return Ray's module of the types of requests and replies.

    Raises:
        ConfigError: Neither vLLM nor SGLang is installed.
    """
    try:
        return import_module(TYPES)
    except ImportError as error:
        text = "ray.serve.llm takes its types of requests from vLLM or SGLang, and neither is installed here; install "
        raise ConfigError(f"{text}one of them, or use dovetail.ray.deployment, which needs neither") from error


def model_of(llm_config: Any) -> RayModel:
    """Return what an `LLMConfig` says of the model.

    Raises:
        ConfigError: `engine_kwargs` holds what is no setting, or what is the ingress's.
    """
    loading = llm_config.model_loading_config
    source = loading.model_source or loading.model_id
    for name in llm_config.engine_kwargs:
        if name in (*COMMON, *RayOptions.model_fields, "served_model_name"):
            text = f"engine_kwargs {name}: this is Ray's here"
            raise ConfigError(f"{text}; its ingress has keys and names, its deployment_config says how many replicas")
    return read_model({"model": str(source), "served_model_name": [llm_config.model_id], **llm_config.engine_kwargs})


def _answering(path: str, reply: str) -> Callable[..., AsyncIterator[Any]]:
    """Return the method that answers a request of a route with a `reply`, one of `types`."""

    async def answer(self: LLMServer, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        async for each in self._answer(path, request, raw_request_info, reply):
            yield each

    return answer


class LLMServer:
    """What `ray.serve.llm` calls a server: requests as Ray's objects, replies as objects or as events of a stream."""

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return the options of Ray's deployment, with what a replica needs of the cluster.

        Raises:
            ConfigError: A wrong setting, or a cluster without what it takes.
        """
        options: dict[str, Any] = copy.deepcopy(llm_config.deployment_config)
        reserved, _ = actor_options(model_of(llm_config), cluster_nodes())
        options["ray_actor_options"] = {**reserved, **options.get("ray_actor_options", {})}
        return options

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        """Start the server.

        Raises:
            ConfigError: What the user can fix.
        """
        types()
        self._llm_config = llm_config
        self._server = ReplicaServer(model_of(llm_config).settings)
        await self._server.start()

    async def start(self) -> None:
        """Do nothing: it has started."""

    async def llm_config(self) -> Any:
        """Return what it was made from."""
        return self._llm_config

    chat = _answering("/v1/chat/completions", "ChatCompletionResponse")
    completions = _answering("/v1/completions", "CompletionResponse")
    embeddings = _answering("/v1/embeddings", "EmbeddingResponse")
    score = _answering("/v1/score", "ScoreResponse")
    tokenize = _answering("/tokenize", "TokenizeResponse")
    detokenize = _answering("/detokenize", "DetokenizeResponse")

    async def reset_prefix_cache(self) -> None:
        """Forget every prefix."""
        async for _ in self._server.answer(ProxiedRequest("POST", "/flush_cache", b"", [NO_HOST], b"")):
            pass

    async def check_health(self) -> None:
        """Raise where only another replica helps."""
        await self._server.check_health()

    async def is_sleeping(self) -> bool:
        """Return false: it cannot."""
        return False

    async def is_paused(self) -> bool:
        """Return false: it cannot."""
        return False

    async def __del__(self) -> None:
        """End the server."""
        if (server := getattr(self, "_server", None)) is not None:
            await server.close()

    async def _answer(self, path: str, request: Any, raw_request_info: Any, reply: str) -> AsyncIterator[Any]:
        """Yield events of a stream as text, or one object: the reply, or Ray's `ErrorResponse`."""
        body = request.model_dump_json(exclude_unset=True, exclude_none=True).encode()
        given = {} if raw_request_info is None else raw_request_info.headers
        headers = [NO_HOST, (b"content-type", b"application/json")]
        headers += [(b"x-request-id", each.encode()) for name, each in given.items() if name.lower() == "x-request-id"]
        pieces = self._server.answer(ProxiedRequest("POST", path, b"", headers, body))
        whole = bytearray()
        head: ResponseHead | None = None
        is_stream = False
        try:
            async for piece in pieces:
                if isinstance(piece, ResponseHead):
                    head = piece
                    kinds = [value for name, value in piece.headers if name.lower() == b"content-type"]
                    is_stream = piece.status == 200 and kinds[:1] != [] and kinds[0].startswith(b"text/event-stream")
                elif is_stream:
                    yield piece.decode("utf-8", "replace")
                else:
                    whole += piece
        finally:
            await pieces.aclose()
        if not is_stream:
            found = msgspec.json.decode(bytes(whole))
            is_good = head is not None and head.status == 200
            yield getattr(types(), reply).model_validate(found) if is_good else error_of(head, found)


def error_of(head: ResponseHead | None, found: Any) -> Any:
    """Return an error's body as Ray has it: its code is the status."""
    known = types()
    detail = found.get("error", {}) if isinstance(found, dict) else {}
    info = known.ErrorInfo(
        message=str(detail.get("message", "the request failed")),
        type=str(detail.get("type", "server_error")),
        param=detail.get("param"),
        code=500 if head is None else head.status,
    )
    return known.ErrorResponse(error=info)
