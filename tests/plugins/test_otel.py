"""The plugin `otel`: the spans that a collector gets, whatever becomes of the collector."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
import requests

from dovetail.contracts import ChoiceTimes, HttpEnd, HttpStart, RequestEnd, RequestStart
from dovetail.contracts.errors import ConfigError
from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server
from dovetail_server.compat.arguments import ArgumentTranslation
from dovetail_testing import HooksConformance

pytest.importorskip("opentelemetry.exporter.otlp", reason="opentelemetry is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dovetail_backends.otel import export, plugin, spans
from dovetail_backends.otel.export import OtelOptions, close, make_provider, protocol_of
from dovetail_backends.otel.spans import Tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "acme=1"}


class Drawn:
    """A tracer, and what it drew."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = Tracer(provider)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        found = self.exporter.get_finished_spans()
        assert len({span.name for span in found}) == len(found), [span.name for span in found]
        return {span.name: span for span in found}

    def http(self, number: int = 1, **trace: str) -> None:
        self.tracer.http_started(HttpStart(number=number, request_id="x", at=100.0, trace=trace))

    def start(self, number: int = 1, http: int = 1, **more: Any) -> None:
        given = {
            "request_id": "chatcmpl-1",
            "num_choices": 1,
            "num_prompt_tokens": 7,
            "operation": "chat",
            "model": "m",
        }
        self.tracer.request_started(RequestStart(**{**given, "number": number, "http": http, "at": 101.0, **more}))

    def end(self, number: int = 1, **more: Any) -> None:
        times = ChoiceTimes(queued_s=1.0, prefill_s=2.0, decode_s=4.0, delivery_s=0.5, grammar_s=0.25, waited_s=0.125)
        given: dict[str, Any] = {
            **{"request_id": "chatcmpl-1", "num_prompt_tokens": 7, "num_completion_tokens": 5, "seconds": 7.5},
            **{"finish_reasons": ("stop",), "num_cached_tokens": 3, "body_s": 0.25, "prepare_s": 0.5, "parse_s": 0.125},
        }
        self.tracer.request_ended(RequestEnd(**{**given, "number": number, "choices": (times,), **more}))

    def http_end(self, number: int = 1, **more: Any) -> None:
        given = {"request_id": "x", "method": "POST", "route": "/v1/chat/completions", "status": 200, "seconds": 8.6}
        self.tracer.http_ended(HttpEnd(**{**given, "number": number, **more}))


@pytest.fixture
def drawn() -> Drawn:
    return Drawn()


def interval(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def test_a_request_is_a_tree_in_its_callers_trace(drawn: Drawn) -> None:
    """Every phase has its place and its time; the caller's trace goes on, with its state."""
    drawn.http(**TRACEPARENT)
    drawn.start(params={"temperature": 0.5, "max_tokens": 9, "min_p": 0.25})
    drawn.end()
    drawn.http_end()
    found = drawn.spans
    root, generation = found.pop("POST /v1/chat/completions"), found.pop("chat m")
    assert {format(span.context.trace_id, "032x") for span in drawn.spans.values() if span.context} == {TRACE}
    assert root.parent is not None
    assert (format(root.parent.span_id, "016x"), root.kind.name) == (PARENT, "SERVER")
    assert root.context is not None
    assert root.context.trace_state.get("acme") == "1"
    assert interval(root) == (100.0, 108.6)
    assert parent_of(generation) == parent_of(found["prepare"]) == id_of(root)
    assert (interval(generation), interval(found.pop("prepare"))) == ((101.0, 108.5), (100.25, 101.0))
    assert {parent_of(span) for span in found.values()} == {id_of(generation)}
    assert {name: interval(span) for name, span in found.items()} == {
        "queue": (101.0, 102.0),
        "grammar": (101.0, 101.25),
        "prefill": (102.0, 104.0),
        "decode": (104.0, 108.0),
        "delivery": (108.0, 108.5),
        "parsing": (104.0, 104.125),
    }
    assert root.attributes is not None
    assert {**root.attributes} == {
        "dovetail.request_id": "x",
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert generation.attributes is not None
    assert {**generation.attributes} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dovetail",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "dovetail.request.min_p": 0.25,
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_in_model_prefill": 2.0,
        "gen_ai.latency.time_in_model_decode": 4.0,
        "gen_ai.latency.time_to_first_token": 3.0,
        "gen_ai.latency.e2e": 7.5,
        "dovetail.retractions": 0,
    }


@pytest.mark.parametrize(
    "header", ["", "x" * 100_000, "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"]
)
def test_a_malformed_trace_begins_a_new_one(drawn: Drawn, header: str) -> None:
    """Its request is drawn all the same."""
    drawn.http(traceparent=header, tracestate="=,;" * 1000)
    drawn.start()
    drawn.end()
    drawn.http_end()
    assert drawn.spans["POST /v1/chat/completions"].parent is None


def test_an_unsampled_trace_is_not_sent(drawn: Drawn) -> None:
    """The caller decides."""
    drawn.http(traceparent=f"00-{TRACE}-{PARENT}-00")
    drawn.start()
    drawn.end()
    drawn.http_end()
    assert not drawn.spans


def test_a_line_of_a_batch_is_a_trace_of_its_own(drawn: Drawn) -> None:
    """It names its batch."""
    drawn.start(http=0, batch_id="batch_1")
    drawn.end()
    root = drawn.spans["chat m"]
    assert (root.parent, root.kind.name) == (None, "SERVER")
    assert root.attributes is not None
    assert root.attributes["dovetail.batch_id"] == "batch_1"
    assert {"queue", "prefill", "decode"} < set(drawn.spans)


def test_what_goes_on_after_its_reply_stays_in_its_trace(drawn: Drawn) -> None:
    """A response in the background begins and ends when its HTTP request is over."""
    drawn.http(**TRACEPARENT)
    drawn.http_end(route="/v1/responses", seconds=0.5)
    drawn.start()
    drawn.end()
    assert parent_of(drawn.spans["chat m"]) == id_of(drawn.spans["POST /v1/responses"])


def test_refusals_and_errors_are_told_apart(drawn: Drawn) -> None:
    """A 429 is no error of the server's; a 503, a client that left, an abort and a cut are each said."""
    for number, status in enumerate((429, 503, None), 1):
        drawn.http(number)
        drawn.http_end(number, status=status, route=f"/{status}")
    drawn.start(5, http=0, model="aborted")
    drawn.end(5, finish_reasons=("abort",))
    drawn.start(6, http=0, model="cut")
    drawn.end(6, finish_reasons=("",), choices=(ChoiceTimes(queued_s=7.5),), parse_s=0.0)
    found = {
        s.name: (s.status.status_code.name, (s.attributes or {}).get("error.type"))
        for s in drawn.exporter.get_finished_spans()
    }
    assert found["POST /429"] == ("UNSET", None)
    assert found["POST /503"] == ("ERROR", "503")
    assert found["POST /None"] == ("UNSET", "client_left")
    assert found["chat aborted"] == ("ERROR", "abort")
    assert found["chat cut"] == ("UNSET", "cut_off")


def test_probes_are_not_drawn(drawn: Drawn) -> None:
    """But in a trace that somebody else began."""
    drawn.http(1)
    drawn.http_end(1, method="GET", route="/health")
    drawn.http(2, **TRACEPARENT)
    drawn.http_end(2, method="GET", route="/v1/models")
    assert set(drawn.spans) == {"GET /v1/models"}


def test_what_is_remembered_is_bounded(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends that were lost, ends without a beginning, and a thousand choices."""
    monkeypatch.setattr(spans, "MAX_OPEN", 10)
    for number in range(1, 100):
        drawn.http(number)
        drawn.start(number, http=number)
    assert (len(drawn.tracer._http), len(drawn.tracer._open)) == (10, 10)
    drawn.end(3)
    drawn.http_end(3)
    assert not drawn.exporter.get_finished_spans()
    times = ChoiceTimes(queued_s=1.0, prefill_s=1.0, decode_s=1.0)
    drawn.end(99, choices=(times,) * 1000, finish_reasons=("stop",) * 1000)
    assert len(drawn.exporter.get_finished_spans()) <= 3 * spans.MAX_CHOICES + 3


class Stuck(SpanExporter):
    """A collector that takes nothing, and does not say so."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.num = 0

    def export(self, batch: Any) -> SpanExportResult:
        self.may.wait(60)
        self.num += len(batch)
        return SpanExportResult.SUCCESS


def test_a_stuck_collector_costs_spans_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it: not whoever draws, and not for long whoever ends the server. What waits is bounded."""
    monkeypatch.setattr(export, "CLOSE_S", 0.1)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "600")
    stuck = Stuck()
    provider = make_provider(OtelOptions(), stuck)
    tracer = Tracer(provider)
    for number in range(1, 2001):
        tracer.http_started(HttpStart(number=number, request_id="x", at=1.0))
        tracer.http_ended(HttpEnd(request_id="x", method="POST", route="/", status=200, seconds=1.0, number=number))
    assert not stuck.num
    closing = threading.Thread(target=close, args=(provider,))
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    stuck.may.set()
    deadline = time.monotonic() + 120
    while stuck.num < 600 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 600 <= stuck.num <= 600 + 512


class Failing(SpanExporter):
    """Fails as it is told to."""

    def __init__(self) -> None:
        self.fails: Any = True

    def export(self, batch: Any) -> SpanExportResult:
        if isinstance(self.fails, Exception):
            raise self.fails
        return SpanExportResult.FAILURE if self.fails else SpanExportResult.SUCCESS


def test_a_collector_that_is_gone_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """With what it cost; and when it is back."""
    import logging

    logging.getLogger("dovetail").propagate = True
    caplog.set_level("INFO", "dovetail")
    failing = Failing()
    told = export.LoggingExporter(failing)
    batch: list[Any] = [object()] * 3
    for fails in (True, OSError("gone"), True, True, False, False):
        failing.fails = fails
        told.export(batch)
    texts = [record.getMessage() for record in caplog.records if record.name == "dovetail.otel"]
    assert texts == [
        "Traces cannot be sent (it was not taken); 3 spans are lost so far.",
        "Traces are sent again; 12 spans were lost.",
    ]


@pytest.mark.parametrize(
    ("endpoint", "environment", "protocol"),
    [
        (None, {}, "grpc"),
        ("collector:4317", {}, "grpc"),
        ("https://collector", {}, "grpc"),
        ("http://collector:4318", {}, "http/protobuf"),
        ("https://collector/otlp/v1/traces", {}, "http/protobuf"),
        ("http://collector:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        ("collector:1", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, "http/protobuf"),
    ],
)
def test_the_protocol_is_what_is_asked_for(
    endpoint: str | None, environment: dict[str, str], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the option, by the environment, or by the address."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert protocol_of(OtelOptions(endpoint=endpoint)) == protocol
    assert protocol_of(OtelOptions(endpoint=endpoint, protocol="grpc")) == "grpc"


@pytest.mark.parametrize("endpoint", ["", "ftp://x", "http://", "http://x:port", "http://x:99999", " "])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    """When the settings are read."""
    with pytest.raises(ValueError, match=r"endpoint|[Pp]ort"):
        OtelOptions(endpoint=endpoint)


def test_a_protocol_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment, too."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match=r"http/json.*possible: grpc, http/protobuf"):
        make_provider(OtelOptions())


def test_flags_of_the_peers_mean_the_plugin() -> None:
    """vLLM's endpoint alone, and SGLang's two flags."""
    vllm = ArgumentTranslation(["--otlp-traces-endpoint", "http://c:4317"], {"--plugin"})
    assert vllm.argv == ["--plugin", "otel", "--otel.endpoint", "http://c:4317"]
    sglang = ArgumentTranslation(
        ["--enable-trace", "--otlp-traces-endpoint=c:4317", "--otlp-service-name", "s"], {"--plugin"}
    )
    assert [word for word in sglang.argv if word not in ("--plugin", "otel")] == [
        *("--otel.endpoint", "c:4317", "--otel.service-name", "s")
    ]


class Collector:
    """Takes spans over HTTP, or gRPC, as a collector does."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def chat(base: str, headers: dict[str, str] | None = None, **body: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Name a fruit as JSON."}], "max_tokens": 8, **body}
    assert requests.post(f"{base}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code == 200


def run_batch(base: str) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    files = {"file": ("in.jsonl", json.dumps({**line, "body": body}) + "\n")}
    sent = requests.post(f"{base}/v1/files", files=files, data={"purpose": "batch"}, timeout=60).json()
    asked = {"input_file_id": sent["id"], "endpoint": line["url"], "completion_window": "24h"}
    batch = requests.post(f"{base}/v1/batches", json=asked, timeout=60).json()
    deadline = time.monotonic() + 60
    while batch["status"] != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = requests.get(f"{base}/v1/batches/{batch['id']}", timeout=60).json()


def test_a_server_sends_what_a_collector_reads(collector: Collector, tmp_path: Any) -> None:
    """With vLLM's flag: a chat with a grammar in its caller's trace, and a line of a batch, sent before the end."""
    process, port = launch_server_cmd(
        f"dovetail serve --otlp-traces-endpoint {collector.endpoint} --file-storage-path {tmp_path}"
    )
    base = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(base, timeout=60)
        schema = {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]}
        asked = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": schema}}
        chat(base, TRACEPARENT, response_format=asked)
        run_batch(base)
    finally:
        terminate_process(process)
    (resource, *_) = [request.resource_spans[0].resource for request in collector.requests]
    named = {pair.key: pair.value.string_value for pair in resource.attributes}
    assert named["service.name"] == "dovetail"
    mine = {span.name: span for span in collector.spans if span.trace_id.hex() == TRACE}
    assert {"POST /v1/chat/completions", "prepare", "queue", "grammar", "prefill", "decode", "parsing"} < set(mine)
    (generation,) = [span for name, span in mine.items() if name.startswith("chat ")]
    root = mine["POST /v1/chat/completions"]
    assert root.parent_span_id.hex() == PARENT
    assert generation.parent_span_id == root.span_id
    for name in ("queue", "prefill", "decode"):
        span = mine[name]
        assert generation.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano + 1_000_000
    assert mine["prefill"].end_time_unix_nano > mine["prefill"].start_time_unix_nano
    lines = [
        span
        for span in collector.spans
        if any(pair.key == "dovetail.batch_id" and pair.value.string_value for pair in span.attributes)
    ]
    assert [line.parent_span_id for line in lines] == [b""]


def test_grpc_and_a_collector_that_is_not_there() -> None:
    """Spans go over gRPC; with nobody there the provider still ends soon."""
    import grpc

    taken: list[ExportTraceServiceRequest] = []

    def take(request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        taken.append(request)
        return ExportTraceServiceResponse()

    handler = grpc.unary_unary_rpc_method_handler(
        take,
        request_deserializer=ExportTraceServiceRequest.FromString,
        response_serializer=ExportTraceServiceResponse.SerializeToString,
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        provider = make_provider(OtelOptions(endpoint=f"127.0.0.1:{port}"))
        provider.get_tracer("test").start_span("one").end()
        close(provider)
        assert [span.name for r in taken for s in r.resource_spans[0].scope_spans for span in s.spans] == ["one"]
    finally:
        server.stop(None).wait(10)


class TestKit(HooksConformance):
    """The conformance kit of hook plugins."""

    name = "otel"
    remembers: ClassVar[int] = spans.MAX_OPEN
    """At most; `test_what_is_remembered_is_bounded` shows the bound."""

    @pytest.fixture(autouse=True)
    def closed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Nobody else stops what the kit starts; no collector listens here."""
        monkeypatch.setattr(export, "make_exporter", lambda options: InMemorySpanExporter())
        yield
        while plugin._providers:
            plugin._providers.pop().shutdown()
