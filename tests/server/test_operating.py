"""What an operator reads of a running server: phases of requests, memory, and who asked for what."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from harness import Harness
from prometheus_client.parser import text_string_to_metric_families

from dovetail.contracts.observers import ChoiceTimes, LoadStats, RequestEnd
from dovetail_server.gateway.child import Child
from dovetail_server.gateway.fleet import Worker
from dovetail_server.metrics.exposition import Metrics
from dovetail_server.observe.logs import SkipCancelled, SkipStatic
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.supervision.supervisor import Supervisor

LOAD: dict[str, Any] = dict.fromkeys(
    ("step", "num_running", "num_queued", "num_used_tokens", "num_cached_tokens", "max_total_tokens"), 1
)


def read(metrics: Metrics) -> dict[str, float]:
    """Every sample without labels but the model's, by name."""
    text = metrics.render("text/plain")[0].decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.mark.parametrize(
    ("style", "names"),
    [
        ("dovetail", {"queue": "dovetail_queue_seconds", "prefill": "dovetail_prefill_seconds"}),
        ("vllm", {"queue": "vllm:request_queue_time_seconds", "prefill": "vllm:request_prefill_time_seconds"}),
        ("sglang", {"queue": "sglang:queue_time_seconds"}),
    ],
)
def test_each_choices_phases_are_counted(style: str, names: dict[str, str]) -> None:
    """A choice that never ran has waited only; sums are those of the choices."""
    metrics = Metrics(style, "m", {})
    choices = (ChoiceTimes(queued_s=0.5, prefill_s=0.25, decode_s=2.0), ChoiceTimes(queued_s=4.0))
    end = RequestEnd(
        request_id="r", num_prompt_tokens=1, num_completion_tokens=2, finish_reasons=("stop", ""), seconds=5.0,
        choices=choices,
    )  # fmt: skip
    metrics.tally.request_ended(end)
    found = read(metrics)
    want = {"queue": (4.5, 2), "prefill": (0.25, 1)}
    for phase, name in {**names, "queue": names["queue"]}.items():
        assert (found[f"{name}_sum"], found[f"{name}_count"]) == want[phase]
    assert (found["dovetail_decode_seconds_sum"], found["dovetail_decode_seconds_count"]) == (2.0, 1)
    assert found.get("vllm:request_inference_time_seconds_sum", 2.25) == 2.25


def test_memory_of_processes_and_of_the_device_is_told() -> None:
    """The engine's where it has a process, the device's where it is none of the host's."""
    metrics = Metrics("dovetail", "m", {}, engine_pid=os.getpid)
    metrics.load.log(LoadStats(**LOAD, gen_throughput=0.0, device_used_bytes=3, device_total_bytes=8))
    found = read(metrics)
    assert found["dovetail_engine_process_resident_memory_bytes"] > 1 << 20
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert (found["dovetail_device_memory_used_bytes"], found["dovetail_device_memory_total_bytes"]) == (3, 8)
    other = Metrics("dovetail", "m", {})
    other.load.log(LoadStats(**LOAD, gen_throughput=0.0))
    assert not [name for name in read(other) if "device_memory" in name or "engine_process" in name]


def test_logged_requests_name_client_and_key(
    make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture
) -> None:
    """The key as the start of its hash, the same for both lines of a request and another one for another key."""
    harness = make_harness(api_key=["alice-key", "bob-key"], log_requests=True)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    logging.getLogger("dovetail").propagate = True
    with caplog.at_level(logging.INFO, logger="dovetail.server"):
        ids = [
            harness.post("/v1/chat/completions", body, headers={"authorization": f"Bearer {key}"}).json()["id"]
            for key in ("alice-key", "bob-key")
        ]
    lines: list[Any] = [record for record in caplog.records if hasattr(record, "request_id")]
    assert [line.request_id for line in lines] == [ids[0], ids[0], ids[1], ids[1]]
    assert len({line.key for line in lines}) == 2
    for line in lines:
        assert line.key.startswith("key-")
        assert len(line.key) == 16
        assert line.client
        assert f"Request {line.request_id} from {line.client}, {line.key}: " in line.getMessage()
    begun, ended = lines[0], lines[1]
    assert (begun.choices, ended.finish_reason) == (1, "stop")
    assert begun.prompt_tokens > 0 < ended.tokens


@pytest.mark.parametrize(("error", "is_kept"), [(asyncio.CancelledError(), False), (ValueError("x"), True)])
def test_only_cancelled_requests_leave_no_traceback(error: BaseException, is_kept: bool) -> None:
    """uvicorn logs both as faults of the application."""
    exc_info: Any = (type(error), error, None)
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "Exception in ASGI application", (), exc_info)
    assert SkipCancelled().filter(record) is is_kept


@pytest.mark.parametrize(
    ("path", "status", "is_kept"),
    [
        ("/playground/app.js", 200, False),
        ("/proxy/playground/app.js?x=1", 304, False),
        ("/docs/swagger-ui.css", 200, False),
        ("/playground/none.js", 404, True),
        ("/playground", 200, True),
        ("/v1/models?after=/docs/", 200, True),
    ],
)
def test_files_that_were_sent_are_not_in_the_access_log(path: str, status: int, is_kept: bool) -> None:
    """A page is fifty of them; one that is missing is a fault."""
    args = ("127.0.0.1:1", "GET", path, "1.1", status)
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', args, None)
    assert SkipStatic().filter(record) is is_kept


def test_the_document_opens_with_chat(make_harness: Callable[..., Harness]) -> None:
    """Paths stand in their order on `/docs`."""
    paths = make_harness().get("/openapi.json").json()["paths"]
    assert next(iter(paths)) == "/v1/chat/completions"


@pytest.mark.parametrize(("at_once", "sent"), [(False, ["SIGTERM"]), (True, ["SIGTERM", "SIGINT"])])
def test_a_second_signal_reaches_the_workers_of_a_gateway(at_once: bool, sent: list[str]) -> None:
    """Each gets a second one, too, of another kind, for two of one kind may become one."""

    class Process:
        """One that ends when it is waited for."""

        pid, returncode = 1, None
        signals: list[str] = []

        def send_signal(self, number: signal.Signals) -> None:
            self.signals.append(signal.Signals(number).name)

        async def wait(self) -> int:
            return 0

    async def end() -> list[str]:
        child = Child(Worker(0, "http://127.0.0.1:9"), ServeSettings(), 9, {}, Supervisor())
        child._process = Process()  # type: ignore[assignment]
        Process.signals = []
        await child.end(at_once=at_once)
        return Process.signals

    assert asyncio.run(end()) == sent
