"""`/v1/models`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Path
from starlette.responses import Response

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.messages.schema import ModelInfo, ModelInfos
from dovetail_server.errors import catalogue as errors
from dovetail_server.http.auth import CALLER
from dovetail_server.http.shown import shown
from dovetail_server.openapi.document import json_route
from dovetail_server.schema.models import Model, ModelList
from dovetail_server.state import ReadyState, ServerState

router = APIRouter(tags=["openai"])
Version = Annotated[str | None, Header(max_length=64)]


def served_models(state: ServerState) -> list[Model]:
    """Return one entry per served name."""
    context_len = state.text.limits.context_len
    root = shown(state.settings.model_path or "", CALLER.get())
    return [Model(id=name, created=state.created, root=root, max_model_len=context_len) for name in state.served_names]


@json_route(router, "/v1/models", reply=ModelList, other_reply=ModelInfos, methods=("GET",))
async def list_models(state: ReadyState, anthropic_version: Version = None) -> Response:
    """List the names under which the model is served; in Anthropic's form for its clients."""
    models = served_models(state)
    reply: ModelList | ModelInfos = ModelList(data=models)
    if anthropic_version is not None:
        infos = [anthropic_model(model) for model in models]
        reply = ModelInfos(data=infos, first_id=infos[0].id, last_id=infos[-1].id)
    return Response(msgspec.json.encode(reply), media_type="application/json")


def anthropic_model(model: Model) -> ModelInfo:
    """Return a served name as Anthropic's clients read it."""
    created = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    most = model.max_model_len
    return ModelInfo(id=model.id, display_name=model.id, created_at=created, max_input_tokens=most, max_tokens=most)


@json_route(router, "/v1/models/{model_id:path}", reply=Model, other_reply=ModelInfo, methods=("GET",))
async def get_model(
    model_id: Annotated[str, Path(min_length=1, max_length=512)],
    state: ReadyState,
    anthropic_version: Version = None,
) -> Response:
    """Describe one served name."""
    found = next((model for model in served_models(state) if model.id == model_id), None)
    if found is None:
        raise errors.model_not_found(model_id, state.served_names)
    shown = found if anthropic_version is None else anthropic_model(found)
    return Response(msgspec.json.encode(shown), media_type="application/json")


@json_route(router, "/v1/models/{model_id:path}", methods=("DELETE",))
async def delete_model(model_id: Annotated[str, Path(min_length=1, max_length=512)], state: ReadyState) -> Response:
    """Say that models are not deleted: they are what the server was started with."""
    if model_id not in state.served_names:
        raise errors.model_not_found(model_id, state.served_names)
    text = f"{model_id!r} is what this server serves and no fine-tuned model of yours; stop the server instead"
    raise RequestError(text, param="model", code="model_not_deletable", status=403)
