"""The hooks of `--plugin otel`."""

from __future__ import annotations

import sys

from opentelemetry.sdk.trace import TracerProvider

from dovetail.contracts import ProcessContext, hookimpl
from dovetail_backends.otel.export import OtelOptions, close, make_provider
from dovetail_backends.otel.spans import Tracer

plugin = sys.modules[__name__]
_providers: list[TracerProvider] = []


@hookimpl
def dovetail_settings() -> type:
    """Return the class of the settings."""
    return OtelOptions


@hookimpl
def dovetail_request_observers(ctx: ProcessContext) -> Tracer:
    """Begin to trace."""
    _providers.append(make_provider(ctx.settings))
    return Tracer(_providers[-1])


@hookimpl
def dovetail_process_stop(ctx: ProcessContext) -> None:
    """Send what waits."""
    while _providers:
        close(_providers.pop())
