"""`/v1/models`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path
from starlette.responses import Response

from dovetail_server import errors
from dovetail_server.openai.models import Model, ModelList
from dovetail_server.openapi import json_route
from dovetail_server.state import ServerState, get_ready_state

router = APIRouter(tags=["openai"])
State = Annotated[ServerState, Depends(get_ready_state)]


def served_models(state: ServerState) -> list[Model]:
    """Return one entry per served name."""
    context_len = state.text.limits.context_len
    root = state.settings.model_path or ""
    return [Model(id=name, created=state.created, root=root, max_model_len=context_len) for name in state.served_names]


@json_route(router, "/v1/models", reply=ModelList, methods=("GET",))
async def list_models(state: State) -> Response:
    """List the names under which the model is served."""
    return Response(msgspec.json.encode(ModelList(data=served_models(state))), media_type="application/json")


@json_route(router, "/v1/models/{model_id:path}", reply=Model, methods=("GET",))
async def get_model(model_id: Annotated[str, Path(min_length=1, max_length=512)], state: State) -> Response:
    """Describe one served name."""
    found = next((model for model in served_models(state) if model.id == model_id), None)
    if found is None:
        raise errors.model_not_found(model_id, state.served_names)
    return Response(msgspec.json.encode(found), media_type="application/json")
