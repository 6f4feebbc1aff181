"""The gateway's application: the layers of every server, its own few routes, and the relay for all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount

from dovetail.contracts.errors import EngineError, RequestError
from dovetail_server.errors import catalogue as errors
from dovetail_server.gateway.fan_out import FanOut
from dovetail_server.gateway.relay import Relay
from dovetail_server.start.app import FORM_BYTES, add_layers, handle_error, handle_http

if TYPE_CHECKING:
    from dovetail_server.gateway.state import GatewayState


def create_app(state: GatewayState) -> Starlette:
    """Build the application of one gateway.

    Raises:
        PluginError: An API takes a path that is the gateway's own.
    """
    own = FanOut(state).routes()
    app = Starlette(
        routes=[*own, Mount("/", app=Relay(state))],
        exception_handlers={
            **dict.fromkeys((RequestError, errors.ServiceError, EngineError), handle_error),
            HTTPException: handle_http,
        },
    )
    app.state.server = state
    settings = state.settings
    upload_bytes = max(settings.max_body_bytes, settings.max_file_bytes + FORM_BYTES)
    add_layers(app, state, {"/v1/files": upload_bytes}, own)
    return app
