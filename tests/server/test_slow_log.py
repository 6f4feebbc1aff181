"""Where a request's time went: what observers are told, and the line of `--log-slow-requests`."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import Harness

from dovetail.contracts.observers import ChoiceTimes, HttpStart, RequestEnd, RequestObserver, RequestStart
from dovetail.messages import Finish, Times, TokenDelta
from dovetail_server.observe.slow_log import SlowLog
from dovetail_server.serving import choice as module
from dovetail_server.serving.choice import ChoiceClock
from dovetail_server.serving.hooks import ApiHooks

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def take(clock: ChoiceClock, times: Times, *, is_last: bool = False) -> None:
    clock.take(TokenDelta(handle=1, ids=[1], times=times, finish=Finish("stop") if is_last else None))


def test_the_parts_are_the_whole(clock: list[float]) -> None:
    """Submitted at 10; taken in at 10.5, admitted at 12, first token at 15, last at 19, taken by its reader at 20."""
    choice = ChoiceClock()
    clock[0] = 15.0
    take(choice, Times(1.5, 0.25, 4.5, 4.5, 0.0))
    clock[0] = 20.0
    take(choice, Times(1.5, 0.25, 4.5, 8.5, 0.75), is_last=True)
    as_times = choice.as_times(10.0, 20.0)
    assert as_times == ChoiceTimes(
        queued_s=2.0, prefill_s=3.0, decode_s=4.0, delivery_s=1.0, grammar_s=0.25, waited_s=0.75
    )


def test_what_did_not_come_is_not_told(clock: list[float]) -> None:
    """Cut off in the queue, cut off while decoding, ended by a stop string, a prompt alone, and one delta for all."""
    assert ChoiceClock().as_times(10.0, 13.0) == ChoiceTimes(queued_s=3.0)
    begun, pooled, queued, whole = ChoiceClock(), ChoiceClock(), ChoiceClock(), ChoiceClock()
    clock[0] = 12.0
    take(begun, Times(1.0, None, 2.0, 2.0, 0.0))
    assert begun.as_times(10.0, 15.0) == ChoiceTimes(queued_s=1.0, prefill_s=1.0, decode_s=3.0)
    take(pooled, Times(1.0, None, None, 2.0, 0.0), is_last=True)
    assert pooled.as_times(10.0, 12.0) == ChoiceTimes(queued_s=1.0, prefill_s=1.0)
    take(queued, Times(None, 0.5, None, 2.0, 0.0), is_last=True)
    assert queued.as_times(10.0, 12.0) == ChoiceTimes(queued_s=2.0, grammar_s=0.5)
    take(whole, Times(0.5, None, 1.0, 2.0, 0.0), is_last=True)
    assert whole.as_times(10.0, 12.0) == ChoiceTimes(queued_s=0.5, prefill_s=0.5, decode_s=1.0)


def test_another_engine_that_goes_on_is_decoding(clock: list[float]) -> None:
    """What the one that died said of queue and prompt holds; what the next one says of its own first token does not."""
    choice = ChoiceClock()
    clock[0] = 12.0
    take(choice, Times(1.0, None, 2.0, 2.0, 0.0))
    clock[0] = 30.0
    take(choice, Times(0.5, None, None, 4.0, 0.0), is_last=True)
    assert choice.as_times(10.0, 30.0) == ChoiceTimes(queued_s=1.0, prefill_s=1.0, decode_s=18.0)


def test_clocks_that_disagree_make_no_negative_part(clock: list[float]) -> None:
    """An engine that claims more than passed here gets what passed."""
    choice = ChoiceClock()
    clock[0] = 11.0
    take(choice, Times(50.0, None, 90.0, 90.0, 0.0))
    take(choice, Times(50.0, None, 90.0, 500.0, 0.0), is_last=True)
    as_times = choice.as_times(10.0, 11.0)
    parts = (as_times.queued_s, as_times.prefill_s or 0.0, as_times.decode_s, as_times.delivery_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(1.0)


class Seen(RequestObserver):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def http_started(self, request: HttpStart) -> None:
        self.events.append(request)

    def request_started(self, request: RequestStart) -> None:
        self.events.append(request)

    def request_ended(self, request: RequestEnd) -> None:
        self.events.append(request)


def test_observers_are_told_whence_a_request_came(make_harness: Callable[..., Harness]) -> None:
    """Number and trace of its HTTP request, operation, parameters; headers that carry no trace are not told."""
    seen = Seen()
    hooks = ApiHooks()
    hooks.observers.add("dovetail_request_observers", "test", seen)
    harness = make_harness(hooks=hooks)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    before = time.time()
    headers = {"traceparent": parent, "tracestate": "a=1", "x-request-id": "mine", "authorization": "Bearer secret"}
    asked = {**BODY, "temperature": 0.5, "max_tokens": 9}
    assert harness.post(CHAT, asked, headers=headers).status_code == 200
    assert harness.post("/v1/completions", {"prompt": "hi", "n": 2, "max_tokens": 3}).status_code == 200
    assert harness.get("/v1/models").status_code == 200
    assert hooks.observers.settle()
    http, start, end, http2, start2, end2, http3 = seen.events
    assert (http.request_id, http.trace) == ("mine", {"traceparent": parent, "tracestate": "a=1"})
    assert before <= http.at <= start.at <= time.time()
    assert (start.http, start.operation, start.model, start.batch_id) == (http.number, "chat", "tiny", "")
    assert (start.params["temperature"], start.params["max_tokens"], "seed" in start.params) == (0.5, 9, False)
    assert end.number == start.number
    assert 0 < end.parse_s < end.seconds
    assert 0 < end.prepare_s < 60
    assert (start2.http, start2.operation, len(end2.choices)) == (http2.number, "text_completion", 2)
    assert len({http.number, http2.number, http3.number}) == 3
    assert "secret" not in repr(seen.events)


def test_nobody_is_told_of_http_starts_who_does_not_ask(make_harness: Callable[..., Harness]) -> None:
    """The server's own observers do not."""
    harness = make_harness(log_slow_requests=100)
    assert harness.state.hooks.observers
    assert not harness.state.hooks.observers.wanting["http_started"]


def test_a_slow_request_is_one_line(make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture) -> None:
    """It names every part; the parts are the whole. A fast one is none."""
    logging.getLogger("dovetail").propagate = True
    caplog.set_level("WARNING")
    harness = make_harness(log_slow_requests=0.000001)
    reply = harness.post(CHAT, {**BODY, "max_tokens": 4, "stream": True})
    assert reply.status_code == 200
    assert harness.state.hooks.observers.settle()
    (record,) = [r for r in caplog.records if r.getMessage().startswith("Slow request")]
    text = record.getMessage()
    numbers = re.fullmatch(
        r"Slow request (\S+): ([\d.]+) s = body ([\d.]+) \+ tokenize ([\d.]+) \+ queue ([\d.]+) \+ prefill ([\d.]+)"
        r" \+ decode ([\d.]+) \+ client ([\d.]+) \+ end ([\d.]+); of it parsing ([\d.]+);"
        r" \d+ prompt tokens \(\d+ cached\), \d+ generated, \w+\.",
        text,
    )
    assert numbers is not None, text
    whole, *parts = map(float, numbers.groups()[1:-1])
    assert sum(parts) == pytest.approx(whole, abs=0.005)
    caplog.clear()
    quiet = make_harness(log_slow_requests=3600)
    assert quiet.post(CHAT, BODY).status_code == 200
    assert quiet.state.hooks.observers.settle()
    assert not caplog.records


def test_the_slowest_choice_is_the_one_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Others ran beside it; a request without any choice's times is all queue."""
    logging.getLogger("dovetail").propagate = True
    caplog.set_level("WARNING")
    log = SlowLog(1.0)
    choices = (ChoiceTimes(queued_s=1.0), ChoiceTimes(queued_s=0.5, prefill_s=3.0, decode_s=2.0, delivery_s=4.0))
    given: dict[str, Any] = {"request_id": "r", "num_prompt_tokens": 3, "num_completion_tokens": 2}
    log.request_ended(
        RequestEnd(**given, finish_reasons=("", ""), seconds=10.0, choices=choices, body_s=0.25, prepare_s=0.25)
    )
    log.request_ended(RequestEnd(**given, finish_reasons=("",), seconds=2.0))
    first, second = [record.getMessage() for record in caplog.records]
    assert "10.500 s = body 0.250 + tokenize 0.250 + queue 0.500 + prefill 3.000 + decode 2.000 + client 4.000" in first
    assert first.endswith("cut off.")
    assert "2.000 s = body 0.000 + tokenize 0.000 + queue 2.000" in second
