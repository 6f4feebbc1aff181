"""Identifiers that callers choose are labels: two callers with one `rid` share nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from exchanges import error_of
from harness import Harness

from dovetail.contracts.observers import RequestEnd, RequestObserver, RequestProgress, RequestStart
from dovetail.engine.streams import StreamClient
from dovetail.messages import Abort, Finish, Ready, StepDeltas, Submit, ToEngine, TokenDelta

ALICE, BOB, ADMIN = "sk-alice-1f6c", "sk-bob-77aa", "sk-admin-e01d"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "rid": "1"}


def as_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class LateEngine(StreamClient):
    """Hears of an abort two steps late, as an engine with a step under way does, and tells the length of the prompt."""

    def __init__(self, harness: Harness) -> None:
        super().__init__()
        self.receive(Ready(harness.engine.info))
        self.inbox: deque[tuple[int, ToEngine]] = deque()
        self.live: dict[int, tuple[list[int], int]] = {}
        self.encode = harness.tokenizer.encode

    def send_to_engine(self, message: ToEngine) -> None:
        self.inbox.append((self.step + 2 * isinstance(message, Abort), message))

    async def run(self) -> None:
        """Tick for ever."""
        while True:
            self.tick()
            await asyncio.sleep(0.001)

    def tick(self) -> None:
        while self.inbox and self.inbox[0][0] <= self.step:
            _, message = self.inbox.popleft()
            if isinstance(message, Submit):
                text = f"<{len(message.prompt_ids)}>" * 30
                self.live[message.handle] = self.encode(text, add_special_tokens=False), 0
            elif isinstance(message, Abort) and self.live.pop(message.handle, None) is not None:
                self.said(TokenDelta(handle=message.handle, ids=[], finish=Finish("abort", None, "aborted")))
        deltas = []
        for handle, (ids, at) in list(self.live.items()):
            finish = Finish("length") if at + 1 == len(ids) else None
            deltas.append(TokenDelta(handle=handle, ids=[ids[at]], prompt_tokens=1, finish=finish))
            self.live[handle] = ids, at + 1
            if finish is not None:
                del self.live[handle]
        self.receive(StepDeltas(step=self.step + 1, deltas=deltas))

    def said(self, delta: TokenDelta) -> None:
        self.receive(StepDeltas(step=self.step + 1, deltas=[delta]))

    async def close(self, *, wait: bool = True) -> None:
        self.engine_died("closed by the test")


@pytest.fixture
def late(make_harness: Callable[..., Harness]) -> Iterator[Harness]:
    """A server with two keys whose engine hears late of what its clients do."""
    harness = make_harness(api_key=[ALICE, BOB], admin_api_key=ADMIN)
    engine = LateEngine(harness)
    harness.state.engine = engine  # type: ignore[assignment]  # what the routes need of it
    ticks = asyncio.run_coroutine_threadsafe(engine.run(), harness.loop)
    yield harness
    ticks.cancel()


def ask(harness: Harness, key: str, word: str, **more: Any) -> str:
    """The reply to a prompt; its length tells the engine what to say."""
    body = {**BODY, "messages": [{"role": "user", "content": word}], "max_tokens": 400, **more}
    reply = requests.post(harness.base + CHAT, json=body, headers=as_key(key), timeout=60)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("end", ["stop", "disconnect"])
@pytest.mark.parametrize("second", [ALICE, BOB])
def test_one_rid_after_another_brings_nothing_of_the_first(late: Harness, end: str, second: str) -> None:
    """Again and again a request ends early, and the next one with its identifier gets its own reply only."""
    want = ask(late, second, "b" * 9)
    assert ask(late, ALICE, "a") != want
    for _ in range(8):
        if end == "stop":
            ask(late, ALICE, "a", stop=[">"])
        else:
            body = {**BODY, "messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "stream": True}
            with requests.post(late.base + CHAT, json=body, headers=as_key(ALICE), stream=True, timeout=60) as reply:
                next(reply.iter_lines())
            late.eventually(lambda: late.state.num_live == 0)
        assert ask(late, second, "b" * 9) == want


def test_another_owners_rid_neither_collides_nor_shows(make_harness: Callable[..., Harness]) -> None:
    """Two owners run one identifier at once; each aborts its own, and an owner's second one is refused."""
    harness = make_harness(api_key=[ALICE, BOB])
    harness.engine.hold.clear()
    replies: dict[str, requests.Response] = {}

    def run(key: str) -> None:
        replies[key] = requests.post(harness.base + CHAT, json=BODY, headers=as_key(key), timeout=60)

    def begin(*keys: str) -> list[threading.Thread]:
        threads = [threading.Thread(target=run, args=(key,)) for key in keys]
        for thread in threads:
            thread.start()
        harness.eventually(lambda: harness.state.num_live == len(harness.engine.live) == 2)
        return threads

    def abort(key: str) -> int:
        return int(harness.post("/abort_request", {"rid": "1"}, headers=as_key(key)).json()["aborted"])

    threads = begin(ALICE, BOB)
    mine = requests.post(harness.base + CHAT, json=BODY, headers=as_key(ALICE), timeout=60)
    assert (mine.status_code, error_of(mine)["code"]) == (409, "duplicate_rid")
    assert abort(ALICE) == 1
    threads[0].join(60)
    assert replies[ALICE].status_code == 400
    assert abort(ALICE) == 0
    harness.eventually(lambda: harness.state.num_live == 1)
    harness.engine.hold.set()
    threads[1].join(60)
    assert replies[BOB].json()["choices"][0]["message"]["content"] == "Hello, world"


def test_an_admin_reaches_every_owners_rid(make_harness: Callable[..., Harness]) -> None:
    """With the admin's key, an identifier names the requests of all who use it."""
    harness = make_harness(api_key=[ALICE, BOB], admin_api_key=ADMIN)
    harness.engine.hold.clear()
    replies: list[int] = []

    def run(key: str) -> None:
        replies.append(requests.post(harness.base + CHAT, json=BODY, headers=as_key(key), timeout=60).status_code)

    threads = [threading.Thread(target=run, args=(key,)) for key in (ALICE, BOB)]
    for thread in threads:
        thread.start()
    harness.eventually(lambda: harness.state.num_live == len(harness.engine.live) == 2)
    assert harness.post("/abort_request", {"rid": "1"}, headers=as_key(ADMIN)).json() == {"aborted": 2}
    for thread in threads:
        thread.join(60)
    assert replies == [400, 400]


class Numbers(RequestObserver):
    """Keeps what it is told by number."""

    def __init__(self) -> None:
        self.told: dict[int, list[str]] = {}

    def request_started(self, request: RequestStart) -> None:
        self.told[request.number] = [request.request_id]

    def request_progressed(self, request: RequestProgress) -> None:
        self.told[request.number].append("progress")

    def request_ended(self, request: RequestEnd) -> None:
        self.told[request.number].append(",".join(request.finish_reasons))


def test_observers_tell_requests_apart_by_number(harness: Harness) -> None:
    """Every request has a number of its own, whatever its caller calls it."""
    observer = Numbers()
    harness.state.hooks.observers.add("dovetail_request_observers", "test", observer)
    for _ in range(3):
        assert harness.post(CHAT, BODY).status_code == 200
    harness.eventually(lambda: [told[-1] for told in observer.told.values()] == ["stop"] * 3)
    assert all(told[0] == "1" for told in observer.told.values())
    assert json.dumps(sorted(observer.told)) == json.dumps(sorted(set(observer.told)))
