"""Sending spans over OTLP. A collector that is slow or gone costs spans, and never a request anything.

Spans wait in a queue of `OTEL_BSP_MAX_QUEUE_SIZE` (2,048) and are sent from a thread of their own; a full queue drops
the oldest. What else OpenTelemetry's SDK reads from the environment holds: samplers, headers, certificates, resources.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Literal
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dovetail.contracts.errors import ConfigError

logger = logging.getLogger("dovetail.otel")
Protocol = Literal["grpc", "http/protobuf"]
HTTP_PORT = 4318
SAY_EVERY_S = 60.0
CLOSE_S = 3.0
"""What still waits when the server stops is sent for so long."""


class OtelOptions(BaseModel):
    """Settings: `--otel.endpoint` and so on."""

    model_config = ConfigDict(extra="forbid")

    endpoint: str | None = Field(
        None,
        max_length=2048,
        description="Where spans are sent: http://host:4317, or http://host:4318/v1/traces over HTTP; "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_ENDPOINT or this machine if not given.",
    )
    protocol: Protocol | None = Field(
        None,
        description="grpc or http/protobuf; OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL, or what "
        "the endpoint looks like if not given.",
    )
    service_name: str | None = Field(
        None, min_length=1, max_length=256, description="service.name of all spans; OTEL_SERVICE_NAME or dovetail."
    )

    @model_validator(mode="after")
    def with_scheme(self) -> OtelOptions:
        """Take `host:4317` for `http://host:4317`, as SGLang does, and refuse what is no address."""
        if self.endpoint is not None:
            if "://" not in self.endpoint:
                self.endpoint = f"http://{self.endpoint}"
            parts = urlsplit(self.endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in self.endpoint):
                raise ValueError(f"endpoint {self.endpoint!r}: give http://host:4317 or https://host:4317")
            _ = parts.port  # raises ValueError for one that is none
        return self


def make_provider(options: OtelOptions, exporter: SpanExporter | None = None) -> TracerProvider:
    """Return a provider whose spans are sent in batches.

    Args:
        options: Where to.
        exporter: Takes them instead, for tests.

    Raises:
        ConfigError: An exporter cannot be made of the options and the environment.
    """
    name = options.service_name or os.environ.get("OTEL_SERVICE_NAME") or "dovetail"
    resource = Resource.create({"service.name": name, "service.version": version("dovetail-llm")})
    for noisy in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
        logging.getLogger(noisy).setLevel(
            logging.CRITICAL
        )  # several lines for each batch; `LoggingExporter` says it once
    try:
        target = exporter or make_exporter(options)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(LoggingExporter(target)))
    except Exception as error:  # of the SDK, which reads the environment here
        raise ConfigError(f"otel: {type(error).__name__}: {error}; see --otel.endpoint and OTEL_* variables") from error
    return provider


def protocol_of(options: OtelOptions) -> Protocol:
    """Return the protocol that was asked for, or that the endpoint looks like.

    Raises:
        ConfigError: The environment asks for another one.
    """
    if options.protocol is not None:
        return options.protocol
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        asked = os.environ.get(variable)
        if asked == "grpc":
            return "grpc"
        if asked == "http/protobuf":
            return "http/protobuf"
        if asked:
            raise ConfigError(f"environment variable {variable}={asked!r}: possible: grpc, http/protobuf")
    parts = urlsplit(options.endpoint or "")
    return "http/protobuf" if parts.port == HTTP_PORT or parts.path.strip("/") else "grpc"


def make_exporter(options: OtelOptions) -> SpanExporter:
    """Return an exporter over OTLP; only what it needs is imported."""
    if protocol_of(options) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=options.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    endpoint = options.endpoint
    if endpoint is not None and not urlsplit(endpoint).path.strip("/"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    return Http(endpoint=endpoint)


class LoggingExporter(SpanExporter):
    """An exporter that says once a minute that it fails, and how many spans that cost; and when it works again."""

    def __init__(self, inner: SpanExporter) -> None:
        """Send through `inner`."""
        self._inner = inner
        self._num_lost = 0
        self._said: float | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        reason = "it was not taken"
        try:
            result = self._inner.export(spans)
        except Exception as error:  # whatever it is, there will be other batches
            result, reason = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                logger.info("Traces are sent again; %d spans were lost.", self._num_lost)
            self._num_lost, self._said = 0, None
            return result
        self._num_lost += len(spans)
        if self._said is None or time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            logger.warning("Traces cannot be sent (%s); %d spans are lost so far.", reason, self._num_lost)
        return result

    def shutdown(self) -> None:
        """End."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what waits in the exporter."""
        return self._inner.force_flush(timeout_millis)


def close(provider: TracerProvider) -> None:
    """Send what waits, for a moment: the SDK itself waits for thirty seconds."""
    ends = threading.Thread(target=provider.shutdown, name="otel close", daemon=True)
    ends.start()
    ends.join(CLOSE_S)
