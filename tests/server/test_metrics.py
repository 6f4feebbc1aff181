"""`/metrics`: what is counted, under whose names, and at what cost to the code that is observed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from harness import Harness
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dovetail.contracts.observers import HttpEnd, RequestEnd, RequestObserver, RequestProgress, RequestStart
from dovetail_server.metrics.exposition import Metrics
from dovetail_server.metrics.series import BOUNDS, STYLES, Gauge
from dovetail_server.metrics.tally import Histogram
from dovetail_server.observe import token_timer as timer_module
from dovetail_server.observe.observers import Observers
from dovetail_server.observe.token_timer import EVERY, EXACT, TokenTimer
from dovetail_server.serving.hooks import ApiHooks, AsgiEndpoint

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Seen(RequestObserver):
    """A third party's observer."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def request_started(self, request: Any) -> None:
        self.events.append(request)

    def request_progressed(self, request: Any) -> None:
        self.events.append(request)

    def request_ended(self, request: Any) -> None:
        self.events.append(request)

    def http_ended(self, request: Any) -> None:
        self.events.append(request)


async def plugin_route(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def counted(make_harness: Callable[..., Harness]) -> Harness:
    hooks = ApiHooks()
    hooks.add_route("/x/acme/{name}", AsgiEndpoint(plugin_route), "acme")
    return make_harness(metrics_style="vllm", hooks=hooks)


def samples(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def scrape(harness: Harness) -> Samples:
    assert harness.state.hooks.observers.settle()
    reply = harness.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain")
    return samples(reply.text)


def value(found: Samples, name: str, **labels: str) -> float:
    hits = [v for (n, have), v in found.items() if n == name and labels.items() <= dict(have).items()]
    assert len(hits) == 1, (name, labels, hits)
    return hits[0]


def test_requests_and_tokens_are_counted(counted: Harness) -> None:
    """Prompt, output, cached tokens, reasons and the three times, for whole replies, streams and several choices."""
    usage = [counted.post(CHAT, BODY).json()["usage"], counted.post(CHAT, {**BODY, "n": 3}).json()["usage"]]
    usage.append(counted.post(CHAT, {**BODY, "max_tokens": 2}).json()["usage"])
    counted.post(CHAT, {**BODY, "stream": True})
    usage.append(usage[0])
    found = scrape(counted)
    assert value(found, "dovetail_requests_total") == 4
    prompt = sum(each["prompt_tokens"] for each in usage)
    output = sum(each["completion_tokens"] for each in usage)
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usage)
    assert value(found, "dovetail_prompt_tokens_total") == prompt
    assert value(found, "dovetail_generation_tokens_total") == output
    assert value(found, "dovetail_cached_prompt_tokens_total") == cached > 0
    assert value(found, "dovetail_choices_finished_total", reason="stop") == 5
    assert value(found, "dovetail_choices_finished_total", reason="length") == 1
    assert value(found, "dovetail_time_to_first_token_seconds_count") == 4
    assert value(found, "dovetail_request_seconds_count") == 4
    assert value(found, "dovetail_inter_token_seconds_count") == output - 6, "one less per choice"
    assert value(found, "dovetail_request_prompt_tokens_sum") == prompt
    assert value(found, "dovetail_request_generation_tokens_sum") == output
    assert value(found, "vllm:generation_tokens_total", model_name="tiny", engine="0") == output
    assert value(found, "vllm:request_success_total", finished_reason="stop") == 5


def test_aborted_and_cut_off_choices_have_their_reasons(counted: Harness) -> None:
    """What somebody aborted, and what a client left, is told apart from what ended by itself."""
    counted.engine.hold.clear()
    asked = threading.Thread(target=counted.post, args=("/generate", {"text": "a", "rid": "one"}))
    asked.start()
    counted.eventually(lambda: ("", "one") in counted.state.live)
    counted.post("/abort_request", {"rid": "one"})
    asked.join(60)
    counted.engine.hold.set()
    counted.text = "x" * 300
    counted.engine.delay_s = 0.02
    with counted.http.post(counted.base + CHAT, json={**BODY, "stream": True}, stream=True, timeout=60) as reply:
        next(reply.iter_lines())
    counted.eventually(lambda: counted.state.num_live == 0)
    found = scrape(counted)
    assert value(found, "dovetail_choices_finished_total", reason="abort") == 1
    assert value(found, "dovetail_choices_finished_total", reason="cut_off") == 1
    assert value(found, "vllm:request_success_total", finished_reason="abort") == 2


def test_http_requests_are_counted_by_route_and_status(counted: Harness) -> None:
    """The route is the pattern, never the path: unknown paths are one series, whatever they are."""
    for _ in range(3):
        counted.get("/v1/models/tiny")
    counted.get("/v1/models/other")
    counted.post(CHAT, {})
    counted.get("/x/acme/a")
    counted.get("/x/acme/b")
    for i in range(50):
        counted.get(f"/nothing/{i}")
    counted.http.request("BREW", counted.base + "/nothing", timeout=60)
    found = scrape(counted)
    name = "dovetail_http_requests_total"
    assert value(found, name, route="/v1/models/{model_id:path}", status="200", method="GET") == 3
    assert value(found, name, route="/v1/models/{model_id:path}", status="404") == 1
    assert value(found, name, route=CHAT, status="400", method="POST") == 1
    assert value(found, name, route="/x/acme/{name}", status="204") == 2
    assert value(found, name, route="", status="404", method="GET") == 50
    assert value(found, "dovetail_http_request_seconds_count", route="", method="GET") == 50
    assert len([key for key in found if key[0] == name]) < 10


def test_load_is_that_of_the_engine(counted: Harness) -> None:
    """Gauges are absent until the engine has said something, and are what it said."""
    assert not [key for key in scrape(counted) if key[0] == "dovetail_requests_running"]

    counted.state.metrics.load.interval_s = 0.01  # type: ignore[misc]
    feeding = asyncio.run_coroutine_threadsafe(counted.state.hooks.observers.log_stats(counted.engine), counted.loop)
    counted.eventually(lambda: any(key[0] == "dovetail_requests_running" for key in scrape(counted)))
    feeding.cancel()
    found = scrape(counted)
    assert value(found, "dovetail_requests_running") == 0
    assert value(found, "dovetail_kv_max_tokens") == 100_000
    assert value(found, "vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("style", list(STYLES))
def test_names_of_each_style(style: str) -> None:
    """Every series of a style is written under its labels, with Dovetail's own beside it."""
    metrics = Metrics(style, "m", {})
    text = metrics.render("")[0].decode()
    labels = {"model_name": "m", **STYLES[style].labels}
    found = samples(text)
    for series in [*STYLES["dovetail"].series, *STYLES[style].series]:
        hits = [dict(have) for name, have in found if name.startswith(series.name)]
        is_empty = (
            isinstance(series, Gauge) or series.name == "dovetail_unknown_fields"
        )  # no engine, no load; no request
        assert bool(hits) is not is_empty, series.name
        if series in STYLES[style].series:
            assert all(labels.items() <= have.items() for have in hits), series.name
    other = {"vllm", "sglang"} - {style}
    assert not [name for name, _ in found if name.startswith(tuple(f"{prefix}:" for prefix in other))]


@pytest.mark.parametrize("style", list(STYLES))
def test_every_series_is_documented(style: str) -> None:
    """The page on metrics names all that can be scraped."""
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text("utf-8")
    text = Metrics(style, "m", {}).render("")[0].decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert [name for name in names if f"`{name}`" not in page and not name.startswith("process_")] == []
    assert [series.name for series in STYLES[style].series if f"`{series.name}" not in page] == []


def test_nothing_is_global() -> None:
    """Two servers in one process count for themselves, and the library's own registry stays as it was."""
    one, two = Metrics("dovetail", "m", {}), Metrics("dovetail", "m", {})
    one.tally.request_started(RequestStart(request_id="r", num_choices=1, num_prompt_tokens=5))
    assert value(samples(one.render("")[0].decode()), "dovetail_prompt_tokens_total") == 5
    assert value(samples(two.render("")[0].decode()), "dovetail_prompt_tokens_total") == 0
    assert b"dovetail" not in prometheus_client.generate_latest()


def test_openmetrics_on_request(counted: Harness) -> None:
    """A scraper that asks for OpenMetrics gets it."""
    reply = counted.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n")


def test_metrics_are_there_while_the_model_loads(make_harness: Callable[..., Harness]) -> None:
    """A scraper sees a server that is starting."""
    assert scrape(make_harness(is_ready=False))


@given(st.lists(st.floats(0, 100) | st.sampled_from(BOUNDS["gap"]), max_size=50))
def test_histograms_are_those_of_the_library(values: list[float]) -> None:
    """Counting by bisection gives the buckets, count and sum that prometheus_client gives."""
    theirs = prometheus_client.Histogram("x", "x", buckets=BOUNDS["vllm_gap"], registry=None)
    ours = Histogram(BOUNDS["vllm_gap"])
    ours.observe_all(values)
    for each in values:
        theirs.observe(each)
    (family,) = theirs.collect()
    buckets = [s.value for s in family.samples if s.name == "x_bucket"]
    assert buckets == ours.cumulative()
    assert next(s.value for s in family.samples if s.name == "x_sum") == pytest.approx(ours.total)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    monkeypatch.setattr(timer_module, "perf_counter", lambda: now[0])
    return iter([now])


def test_pace_tells_the_first_token_at_once_and_the_rest_about_every_second(clock: Iterator[list[float]]) -> None:
    """Each token is told of once, with the time since the one before in its choice; a delta's share it."""
    now = next(clock)
    seen, observers = Seen(), Observers()
    observers.add("dovetail_request_observers", "test", seen)
    timer = TokenTimer(observers, "r", 1, began=99.5)
    timer.record(0, 1, now[0] - 0.5)
    assert observers.settle()
    assert (seen.events[0].first_token_s, seen.events[0].num_tokens, list(seen.events[0].gaps_s)) == (0.5, 1, [])
    for _ in range(4):
        now[0] += 0.125
        timer.record(0, 1, now[0] - 0.5)
    now[0] += 0.25
    timer.record(1, 2, now[0])
    timer.record(0, 0, now[0])
    assert observers.settle()
    assert len(seen.events) == 1
    now[0] += 0.5
    timer.record(0, 2, now[0])
    assert observers.settle()
    told = seen.events[1]
    assert (told.first_token_s, told.num_tokens) == (None, 8)
    assert list(told.gaps_s) == [0.125] * 4 + [0.375] * 2
    now[0] += 0.25
    timer.record(1, 1, now[0])
    timer.flush()
    timer.flush()
    assert observers.settle()
    assert len(seen.events) == 3
    assert list(seen.events[2].gaps_s) == [0.75]
    assert timer.parse_s == 5 * 0.5


def test_of_a_long_reply_some_steps_are_timed_for_all(clock: Iterator[list[float]]) -> None:
    """The first sixteen, and then each sixteenth, which stands for those behind it."""
    now, timer = next(clock), TokenTimer(Observers(), "r", 1, began=99.5)
    for step in range(64):
        timer.record(0, 1, now[0] - 0.5 if step <= EXACT or step % EVERY == 0 else None)
    assert timer.num_steps == 64
    assert timer.parse_s == 64 * 0.5


def test_a_third_party_sees_what_the_server_counts(make_harness: Callable[..., Harness]) -> None:
    """An observer of a plugin is told of the same events, in order, with the same numbers."""
    seen, hooks = Seen(), ApiHooks()
    hooks.observers.add("dovetail_request_observers", "acme", seen)
    harness = make_harness(hooks=hooks)
    reply = harness.post(CHAT, {**BODY, "n": 2}, headers={"x-request-id": "mine"})
    harness.eventually(lambda: bool(seen.events) and isinstance(seen.events[-1], HttpEnd))
    start, *progress, end, http = seen.events
    assert isinstance(start, RequestStart)
    assert isinstance(end, RequestEnd)
    assert all(isinstance(each, RequestProgress) for each in progress)
    usage = reply.json()["usage"]
    assert sum(each.num_tokens for each in progress) == usage["completion_tokens"] == end.num_completion_tokens
    assert (http.route, http.status, http.method, http.request_id) == (CHAT, 200, "POST", "mine")
    assert progress[0].first_token_s > 0
    assert end.num_cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]
