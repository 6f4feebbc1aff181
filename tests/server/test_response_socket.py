"""WebSocket at `/v1/responses`, with openai-python's connection and with a plain one over a real server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from harness import Harness
from openai import OpenAI
from replies import response_events
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from dovetail_server.apis.responses.keeper import LastResponse, Memory

SAID = {"type": "message", "role": "user", "content": "remember 7"}
ALICE, BOB = "sk-alice", "sk-bob"
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture
def talking(make_harness: Callable[..., Harness], tmp_path: Path) -> Harness:
    return make_harness(context_len=8192, file_storage_path=tmp_path, min_free_disk_bytes=0)


@contextmanager
def opened(server: Harness, path: str = "/v1/responses", **options: Any) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{server.port}{path}", **options) as found:
        yield found


def send(link: ClientConnection, given: Any = "hi", **fields: Any) -> None:
    link.send(json.dumps({"type": "response.create", "model": "tiny", "input": given, **fields}))


def received(link: ClientConnection) -> list[dict[str, Any]]:
    """Return the events up to the one that ends a response."""
    events = []
    while not events or events[-1]["type"] not in ENDS:
        events.append(json.loads(link.recv(timeout=60)))
    return events


def ask(link: ClientConnection, given: Any = "hi", **fields: Any) -> dict[str, Any]:
    send(link, given, **fields)
    return received(link)[-1]


@pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")  # openai-python's
def test_with_openais_client(talking: Harness) -> None:
    """Its connection gets the events of its own types, and goes on with `previous_response_id`."""
    client = OpenAI(base_url=f"{talking.base}/v1", api_key="none")
    with client.responses.connect() as connection:
        connection.response.create(model="tiny", input="hi")
        kinds, text = [], ""
        for event in connection:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
            if event.type == "response.completed":
                first = event.response
                break
        assert (kinds[:2], text) == (["response.created", "response.in_progress"], "Hello, world")
        connection.response.create(model="tiny", input="more", previous_response_id=first.id)
        assert next(event for event in connection if event.type == "response.completed").response.status == "completed"
        connection.response.create(model="tiny", input="more", previous_response_id="resp_none")
        error = next(event for event in connection if event.type == "error")
        assert (error.status, error.error.param) == (404, "previous_response_id")
    client.close()


def test_the_events_are_the_streams(talking: Harness) -> None:
    """The same, one a message, but for identifiers and times; one connection has several responses."""
    told = response_events(talking.post("/v1/responses", {"model": "tiny", "input": "hi", "stream": True}))

    def plain(events: list[dict[str, Any]]) -> list[Any]:
        changes = {"id", "item_id", "created_at", "completed_at", "response_id"}
        text = json.dumps(events)
        return list(json.loads(text, object_hook=lambda one: {k: v for k, v in one.items() if k not in changes}))

    with opened(talking) as link:
        for _ in range(2):
            send(link)
            assert plain(received(link)) == plain(told)


@pytest.mark.parametrize("store", [True, False])
def test_what_it_continues(talking: Harness, store: bool) -> None:
    """Stored or not, a response is found by the next one on its connection; the prompt is that of all items."""
    with opened(talking) as link:
        first = ask(link, [SAID], store=store)["response"]
        second = ask(link, "and?", store=store, previous_response_id=first["id"])["response"]
        assert second["previous_response_id"] == first["id"]
        ask(link, "more", store=store, previous_response_id=second["id"])
        prompt = talking.engine.submits[-1].prompt_ids
        ask(link, [SAID, *first["output"], {"role": "user", "content": "and?"}, *second["output"],
                   {"role": "user", "content": "more"}], store=False)  # fmt: skip
        assert talking.engine.submits[-1].prompt_ids == prompt
    body = {"model": "tiny", "input": "x", "previous_response_id": first["id"]}
    assert talking.post("/v1/responses", body).status_code == (200 if store else 404)
    with opened(talking) as link:
        assert (ask(link, "x", previous_response_id=first["id"])["type"] == "error") is not store


def test_a_large_body_continues_too(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """Where another process reads it."""
    server = make_harness(context_len=1 << 18, file_storage_path=tmp_path, min_free_disk_bytes=0, body_processes=1)
    with opened(server) as link:
        first = ask(link, "hello " * 10_000, store=False)["response"]
        second = ask(link, "hello " * 10_000, store=False, previous_response_id=first["id"])
        assert second["type"] == "response.completed", second
        assert len(server.engine.submits[-1].prompt_ids) > 100_000


def test_a_prompt_is_prepared(talking: Harness) -> None:
    """`generate: false` and `prewarm` compute the prompt and end without output; what they made can be continued."""
    with opened(talking) as link:
        for fields in ({"generate": False}, {"prompt_cache_options": {"prewarm": True}}):
            event = ask(link, [SAID], store=False, **fields)
            assert (event["type"], event["response"]["output"]) == ("response.completed", [])
            ask(link, "and?", store=False, previous_response_id=event["response"]["id"])
            prompt = talking.tokenizer.decode(talking.engine.submits[-1].prompt_ids, skip_special_tokens=True)
            assert "remember 7" in prompt
            assert "and?" in prompt


@pytest.mark.parametrize(
    ("message", "param", "word"),
    [
        ("{", None, "not valid JSON"),
        ("[]", None, "no event"),
        ('{"input": "x"}', "type", "is missing"),
        ('{"type": "response.steer", "input": "x"}', "type", "possible: response.create"),
        ('{"type": "response.create", "input": "x", "stream": false}', "stream", "leave it out"),
        ('{"type": "response.create", "input": "x", "background": true}', "background", "POST"),
        ('{"type": "response.create", "input": "x", "stream_id": "1"}', "stream_id", "unknown field"),
        ('{"type": "response.create", "input": "x", "temperature": -1}', "temperature", "greater"),
        ('{"type": "response.create", "input": "x", "model": "other"}', "model", "served: tiny"),
        (b"\xff\xfe", None, "not valid JSON"),
    ],
)
def test_errors_are_events(talking: Harness, message: str | bytes, param: str | None, word: str) -> None:
    """With HTTP's status and error; the connection goes on."""
    with opened(talking) as link:
        link.send(message)
        [event] = received(link)
        assert (event["type"], event["error"]["param"]) == ("error", param)
        assert 400 <= event["status"] < 500
        assert word in event["error"]["message"]
        assert ask(link)["type"] == "response.completed"


def test_a_stream_with_true_and_other_addresses(talking: Harness) -> None:
    """`stream: true` says what is so; addresses that mean the route lead to it."""
    for path in ("/responses", "//v1/responses", "/openai/v1/responses", "/openai/deployments/tiny-too/responses"):
        with opened(talking, path) as link:
            assert ask(link, stream=True)["response"]["status"] == "completed"


def test_one_at_a_time(talking: Harness) -> None:
    """What is sent meanwhile is answered in order, and nothing of two responses is mixed."""
    with opened(talking) as link:
        for at in range(30):
            send(link, f"q{at}", metadata={"at": str(at)})
        for at in range(30):
            events = received(link)
            assert events[-1]["response"]["metadata"] == {"at": str(at)}
            assert {event["response"]["id"] for event in events if "response" in event} == {events[0]["response"]["id"]}


def test_a_client_that_leaves_ends_its_work(talking: Harness) -> None:
    """With a close or without one; nothing runs on, nothing is held."""
    talking.text = "word " * 400
    for is_polite in (True, False):
        talking.engine.delay_s = 0.05
        with opened(talking) as link:
            send(link, store=False)
            json.loads(link.recv(timeout=60))
            talking.eventually(lambda: talking.state.num_live == 1)
            if not is_polite:
                link.socket.shutdown(socket.SHUT_RDWR)
            else:
                link.close()
        talking.eventually(lambda: talking.state.num_live == 0 and talking.state.num_held_bytes == 0)
    connections = talking.server.config.http.keywords["open_connections"]  # type: ignore[union-attr]
    talking.http.close()
    talking.eventually(lambda: connections.num_open == 0)


def test_a_client_that_reads_nothing_is_cut_off(make_harness: Callable[..., Harness]) -> None:
    """After `--stream-write-timeout`; its buffer is the connection's, whatever the model writes."""
    server = make_harness(stream_write_timeout=0.5, context_len=1 << 16)
    server.text = "word " * 60_000
    with connect(f"ws://127.0.0.1:{server.port}/v1/responses", max_queue=1) as link:
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send(link, store=False, max_output_tokens=60_000)
        server.eventually(lambda: server.state.num_live == 1)
        server.eventually(lambda: server.state.num_live == 0)
        with pytest.raises(ConnectionClosed):
            received(link)


def test_limits(make_harness: Callable[..., Harness]) -> None:
    """Of one message, of all that are held, and of silence."""
    server = make_harness(max_body_bytes=1 << 16, max_queued_bytes=1 << 17, websocket_idle_timeout=0.5)
    with opened(server) as link, pytest.raises(ConnectionClosed) as closed:
        ask(link, "x" * (1 << 17))
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009
    with opened(server) as link, pytest.raises(ConnectionClosed) as closed:
        link.recv(timeout=60)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1000, "idle")
    server.eventually(lambda: server.state.num_held_bytes == 0)


def test_messages_that_are_held_are_bounded(make_harness: Callable[..., Harness]) -> None:
    """Parts of messages count as bodies do: where there is no room the connection ends, and others are served."""
    server = make_harness(max_body_bytes=1 << 16, max_queued_bytes=1 << 17, api_key=[ALICE, BOB])
    key = {"additional_headers": {"authorization": f"Bearer {ALICE}"}}
    stack = ExitStack()
    links = [stack.enter_context(opened(server, **key)) for _ in range(6)]
    threads = [threading.Thread(target=part, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    server.eventually(lambda: any(link.close_code == 1013 for link in links))
    assert server.state.num_held_bytes <= 1 << 17
    body = {"model": "tiny", "input": "x"}
    assert server.post("/v1/responses", body, headers={"authorization": f"Bearer {BOB}"}).status_code == 200
    stack.close()
    for thread in threads:
        thread.join(60)
    server.eventually(lambda: server.state.num_held_bytes == 0)


def part(link: ClientConnection) -> None:
    """Send a message that does not end."""

    def pieces() -> Iterator[str]:
        for _ in range(15):
            yield "x" * 4096
        time.sleep(2)

    with suppress(ConnectionClosed, OSError):
        link.send(pieces())


def test_keys(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """A key is asked for before there is a connection; what one remembers is no one else's; a rate holds for each."""
    server = make_harness(api_key=[ALICE, BOB], file_storage_path=tmp_path, min_free_disk_bytes=0)
    keys = [{"additional_headers": {"authorization": f"Bearer {key}"}} for key in (ALICE, BOB)]
    with opened(server, **keys[0]) as alice, opened(server, **keys[1]) as bob:
        mine = ask(alice, [SAID])["response"]["id"]
        assert ask(bob, previous_response_id=mine)["status"] == 404
        kept = ask(alice, [SAID], store=False)["response"]["id"]
        assert ask(bob, previous_response_id=kept, store=False)["status"] == 404


def test_it_ends_with_the_server(make_harness: Callable[..., Harness]) -> None:
    """Draining waits for a response, and for no silent connection; a new one is refused in words."""
    server = make_harness(drain_timeout=30)
    server.text = "word " * 20
    server.engine.delay_s = 0.02
    with opened(server) as idle, opened(server) as busy:
        send(busy, store=False)
        busy.recv(timeout=60)
        server.loop.call_soon_threadsafe(server.server._begin_drain)
        with pytest.raises(ConnectionClosed) as closed:
            idle.recv(timeout=60)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "draining")
        assert received(busy)[-1]["type"] == "response.completed"
        with pytest.raises(ConnectionClosed):
            busy.recv(timeout=60)
    server.thread.join(60)
    assert not server.thread.is_alive()


def test_what_connections_remember_is_bounded() -> None:
    """The owner of the most forgets first, the oldest of its connections; whoever has ended counts no more."""
    memory = Memory(100)
    small = LastResponse(memory, "bob")
    small.remember("resp_s", [(b"x" * 10, b"")])
    links = [LastResponse(memory, "alice") for _ in range(5)]
    for at, link in enumerate(links):
        link.remember(f"resp_{at}", [(b"x" * 20, b"x" * 10)])
    assert [link.find(f"resp_{at}") is not None for at, link in enumerate(links)] == [False, False, True, True, True]
    assert small.find("resp_s") is not None
    links[2].remember("resp_big", [(b"x" * 101, b"")])
    assert links[2].find("resp_big") is None
    for link in (*links, small):
        link.forget()
    LastResponse(memory, "x").remember("r", [(b"x" * 100, b"")])
    assert small.find("resp_s") is None
