"""Which requests are prepared at once, and which in a worker thread."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness import Harness

from dovetail.contracts.requests import Request, Text, Tools
from dovetail.processing.input import Preparation
from dovetail_server.reading import quick
from dovetail_server.reading.context import MAX_PREPARING
from dovetail_server.reading.quick import QuickRequests

HI = [{"role": "user", "content": "hi"}]
LONG = "many words " * 1000
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads in which requests were prepared."""
    seen: list[threading.Thread] = []
    rendered = Preparation.rendered

    def noting(self: Preparation, **options: Any) -> Any:
        seen.append(threading.current_thread())
        return rendered(self, **options)

    monkeypatch.setattr(Preparation, "rendered", noting)
    return seen


@pytest.mark.parametrize(
    ("path", "fields", "is_quick"),
    [
        ("/v1/completions", {"prompt": "abc", "temperature": 0, "n": 2, "stream": True}, True),
        ("/v1/completions", {"prompt": [5] * 2000}, True),
        ("/v1/completions", {"prompt": [[5, 6], [7]]}, True),
        ("/v1/completions", {"prompt": LONG}, False),
        ("/v1/completions", {"prompt": "abc", "n": 9}, False),
        ("/v1/completions", {"prompt": "abc", "stop_regex": "a+"}, False),
        ("/v1/completions", {"prompt": "abc", "best_of": 2}, True),
        ("/v1/chat/completions", {"messages": HI, "seed": 4, "stop": ["x"]}, True),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, False),
        ("/v1/chat/completions", {"messages": HI, "response_format": SCHEMA}, False),
        ("/v1/chat/completions", {"messages": HI, "tools": [TOOL]}, False),
        ("/v1/messages", {"messages": HI, "max_tokens": 5, "system": "Be brief."}, True),
        ("/v1/messages", {"messages": HI, "max_tokens": 5, "system": LONG}, False),
    ],
    ids=str,
)
def test_short_plain_requests_need_no_thread(
    path: str, fields: dict[str, Any], is_quick: bool, harness: Harness, threads: list[threading.Thread]
) -> None:
    """They are prepared by the server's own thread; whatever may take longer is not, and is served or refused alike."""
    reply = harness.post(path, {"model": "tiny", **fields})
    assert reply.status_code in (200, 400), reply.text
    assert {thread is harness.thread for thread in threads} == {is_quick}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_tools_that_were_quick_need_no_thread_again(
    path: str, thinking: Harness, threads: list[threading.Thread]
) -> None:
    """Other tools do, until they were prepared once, too."""
    chat = path.endswith("completions")

    def ask(name: str) -> bool:
        function = {"name": name, "parameters": {"type": "object"}}
        tool = {"type": "function", "function": function} if chat else {"type": "function", **function}
        given: dict[str, Any] = {"messages": HI} if chat else {"input": "hi", "store": False}
        reply = thinking.post(path, {"model": "tiny", "tools": [tool], **given})
        assert reply.status_code == 200, reply.text
        return threads[-1] is thinking.thread

    names = [f"{path[4:7]}{name}" for name in "aabab"]  # the server knows tools of another test
    assert [ask(name) for name in names] == [False, True, False, True, True]


def test_a_package_s_request_is_prepared_by_the_event_loop(
    loose_server: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer is a package's code, which only there is ended where it does not end."""
    with monkeypatch.context() as patch:
        patch.setattr(loose_server.state, "together", None)
        assert loose_server.post("/loose/say", {}).status_code == 200
        assert loose_server.post("/v1/completions", {"model": "tiny", "prompt": "abc"}).status_code == 500
    assert loose_server.post("/v1/completions", {"model": "tiny", "prompt": "abc"}).status_code == 200


def constrained(**fields: Any) -> list[Request]:
    return [Request(prompts=[Text(text="a")], **fields)]


def test_a_grammar_is_quick_once_it_was() -> None:
    """Not another one, nor with another backend or tools, nor one that took long."""
    known, tools = QuickRequests(), Tools(tools=[TOOL])
    asked = [{"grammar": {"regex": "a"}}, {"grammar": {"regex": "b"}}, {"tools": tools}]
    asked += [{"grammar": {"regex": "a"}, "grammar_backend": "x"}, {"grammar": {"regex": "a"}, "tools": tools}]
    for number, fields in enumerate(asked):
        assert [known.has(constrained(**each), 100) for each in asked] == [at < number for at in range(len(asked))]
        known.timed(lambda: None, constrained(**fields))()
    assert not known.has(constrained(grammar={"regex": "a"}), quick.TEXT_BYTES + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "KNOWN_S", -1.0)
        known.timed(lambda: None, constrained(grammar={"regex": "slow"}))()
    assert not known.has(constrained(grammar={"regex": "slow"}), 100)


def test_grammars_that_are_known_are_bounded() -> None:
    """Those of a client that sends a new one each time do not add up."""
    known = QuickRequests()
    for number in range(3 * quick.MAX_KNOWN):
        known.timed(lambda: None, constrained(grammar={"regex": f"{number}"}))()
        assert len(known._known) <= quick.MAX_KNOWN


def test_few_threads_prepare_at_a_time(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would hold Python's lock, and the event loop would wait for all; the others wait for their turn."""
    going, most = [0], [0]
    rendered = Preparation.rendered

    def slow(self: Preparation, **options: Any) -> Any:
        going[0] += 1
        most[0] = max(most[0], going[0])
        time.sleep(0.02)
        try:
            return rendered(self, **options)
        finally:
            going[0] -= 1

    monkeypatch.setattr(Preparation, "rendered", slow)
    body = {"model": "tiny", "prompt": LONG}
    with ThreadPoolExecutor(3 * MAX_PREPARING) as clients:
        replies = list(clients.map(lambda _: harness.post("/v1/completions", body), range(3 * MAX_PREPARING)))
    assert {reply.status_code for reply in replies} <= {200, 400}
    assert most == [MAX_PREPARING]
