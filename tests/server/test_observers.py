"""Observers have threads of their own: a slow one keeps nobody waiting, and loses events only when it is far behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import Harness

from dovetail.contracts.errors import PluginError
from dovetail.contracts.observers import HttpEnd, LoadStats, RequestObserver, StatLogger
from dovetail_server.observe import observers as module
from dovetail_server.observe.observers import Observers
from dovetail_server.serving.hooks import ApiHooks

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def http(number: int) -> HttpEnd:
    return HttpEnd(request_id=str(number), method="GET", route="/", status=200, seconds=0.1)


class Blocked(RequestObserver):
    """Takes events when it may, and notes them."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.seen: list[Any] = []
        self.threads: set[str] = set()

    def http_ended(self, request: HttpEnd) -> None:
        self.may.wait(60)
        self.threads.add(threading.current_thread().name)
        self.seen.append(int(request.request_id) if request.request_id.isdigit() else request.route)

    def events_lost(self, num_events: int) -> None:
        self.seen.append(("lost", num_events))


@pytest.fixture
def blocked() -> Blocked:
    return Blocked()


def observed(*targets: Any) -> Observers:
    found = Observers()
    for target in targets:
        found.add("dovetail_request_observers", "acme", target)
    return found


def test_a_slow_observer_keeps_no_client_waiting(make_harness: Callable[..., Harness], blocked: Blocked) -> None:
    """While one is stuck in a call, requests are served, and other observers and /metrics are told."""

    class Stuck(Blocked):
        def request_started(self, request: Any) -> None:
            self.may.wait(60)

        request_progressed = request_ended = request_started

    hooks, stuck = ApiHooks(), Stuck()
    other = Blocked()
    other.may.set()
    hooks.observers.add("dovetail_request_observers", "acme", [stuck, other])
    harness = make_harness(hooks=hooks)
    for _ in range(5):
        assert harness.post(CHAT, BODY).status_code == 200
        assert harness.post(CHAT, {**BODY, "stream": True}).status_code == 200
    harness.eventually(lambda: len(other.seen) == 10)
    harness.eventually(lambda: "dovetail_requests_total" in harness.get("/metrics").text)
    assert stuck.seen == []
    stuck.may.set()
    harness.eventually(lambda: len(stuck.seen) >= 10)


def test_the_order_is_kept(blocked: Blocked) -> None:
    """Events come one by one, in one thread, in the order in which they happened."""
    blocked.may.set()
    found = observed(blocked)
    for i in range(5000):
        found.notify("http_ended", http(i))
    assert found.settle()
    assert blocked.seen == list(range(5000))
    assert blocked.threads == {"observer Blocked"}
    found.close()


def test_one_that_is_far_behind_loses_events_and_is_told(
    blocked: Blocked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory stays bounded; what is lost is the newest, said once in the log, and counted for the observer."""
    monkeypatch.setattr(module, "MAX_WAITING", 10)
    monkeypatch.setattr("dovetail_server.observe.observers.logger.parent.propagate", True)
    found = observed(blocked)
    for i in range(500):
        found.notify("http_ended", http(i))
    (watched,) = found.handles
    lost = watched.num_lost
    assert 480 <= lost <= 490
    assert len([record for record in caplog.records if "is slow" in record.message]) == 1
    blocked.may.set()
    assert found.settle()
    found.notify("http_ended", http(500))
    assert found.settle()
    kept = 500 - lost
    assert blocked.seen == [*range(kept), ("lost", lost), 500]
    found.close()


def test_a_method_that_does_nothing_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who overrides nothing has no thread."""
    found = observed(RequestObserver())
    found.notify("http_ended", http(1))
    assert found.handles[0]._thread is None


def test_async_observers_are_refused() -> None:
    """What nobody would await is a mistake that is told at the start."""

    class Waits(RequestObserver):
        async def request_ended(self, request: Any) -> None:  # type: ignore[override]
            await asyncio.sleep(0)

    class Load(StatLogger):
        async def log(self, stats: Any) -> None:  # type: ignore[override]
            await asyncio.sleep(0)

    with pytest.raises(PluginError, match=r"acme: Waits.request_ended is `async def`.*write a plain function"):
        observed(Waits())
    with pytest.raises(PluginError, match=r"acme: Load.log is `async def`"):
        Observers().add("dovetail_stat_loggers", "acme", Load())


@pytest.mark.parametrize("fault", ["raises", "exits", "returns a coroutine"])
def test_one_that_keeps_failing_is_removed(fault: str) -> None:
    """An exception, `sys.exit` and a result that is to be awaited are failures; five in a row are enough."""

    async def never() -> None:
        return None

    class Clumsy(RequestObserver):
        calls = 0

        def http_ended(self, request: Any) -> Any:
            self.calls += 1
            if fault == "raises":
                raise KeyError("lost")
            if fault == "exits":
                raise SystemExit(0)
            return never()

    clumsy = Clumsy()
    found = observed(clumsy)
    for i in range(20):
        found.notify("http_ended", http(i))
    assert found.settle()
    assert (clumsy.calls, found.handles) == (5, [])
    assert "Clumsy.http_ended of acme was removed after 5 failures in a row" in found.removed[0]
    found.close()


def test_an_object_of_both_kinds_has_one_thread() -> None:
    """Its methods never run at the same time."""

    class Both(RequestObserver, StatLogger):
        interval_s = 0.01
        inside = most = 0

        def http_ended(self, request: Any) -> None:
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.0005)
            self.inside -= 1

        def log(self, stats: Any) -> None:
            self.http_ended(stats)

    both, found = Both(), Observers()
    found.add("dovetail_request_observers", "acme", both)
    found.add("dovetail_stat_loggers", "acme", both)
    assert found.wanting["http_ended"] == found.wanting["log"]
    stats = LoadStats(
        step=1, num_running=0, num_queued=0, num_used_tokens=0, num_cached_tokens=0, max_total_tokens=1,
        gen_throughput=0.0,
    )  # fmt: skip
    for i in range(200):
        found.notify("http_ended", http(i))
        found.notify("log", stats)
    assert found.settle()
    assert both.most == 1
    found.close()


def test_what_waits_is_told_at_the_end(blocked: Blocked) -> None:
    """Stopping waits for observers that get on, and not for one that is stuck."""
    blocked.may.set()
    found = observed(blocked)
    for i in range(100):
        found.notify("http_ended", http(i))
    found.close()
    assert blocked.seen == list(range(100))
    found.notify("http_ended", http(100))
    assert len(blocked.seen) == 100


def test_stopping_does_not_wait_for_one_that_is_stuck(blocked: Blocked, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a moment, and its thread does not keep the process."""
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    found = observed(blocked)
    found.notify("http_ended", http(1))
    assert not found.settle(0.05)
    found.close()
    assert found.handles[0]._thread is not None
    assert found.handles[0]._thread.daemon
    blocked.may.set()
