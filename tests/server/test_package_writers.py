"""What a package's writer gives or does costs its own request and is told by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as replace_route
from typing import Any

import msgspec
import pytest
from harness import Harness
from package_apis import WHO, Odd, Says, Strange

from dovetail.contracts.replies import Reply, StepView
from dovetail_server.apis.guarded import MAX_PIECE, Guarded
from dovetail_server.apis.routes import BUILT_IN


def raises() -> bytes:
    raise KeyError("no words")


def exits() -> bytes:
    raise SystemExit(3)


def interrupts() -> bytes:
    raise KeyboardInterrupt


def test_a_route_that_only_streams_has_requests_that_do(strange: Strange, make_harness: Callable[..., Harness]) -> None:
    """A whole reply there is the package's fault, which the error names."""
    [route] = [replace_route(route, only_streams=True) for route in strange.routes()]
    served = make_harness(apis=(*BUILT_IN, Guarded(strange, WHO, [route])))
    assert served.post("/loose/say", {"stream": True}).status_code == 200
    assert "whose stream is False; possible: True" in served.post("/loose/say", {}).json()["error"]["message"]


def test_a_writer_may_give_its_bytes_in_any_form(strange_server: Harness) -> None:
    """A buffer that it wrote into, or a view of one."""
    for made in (bytearray(b"[1]"), memoryview(b"[1]")):
        Odd.odd["whole"] = lambda made=made: made
        assert strange_server.post("/loose/say", {}).json() == [1]


@pytest.mark.parametrize("name", ["open", "step", "close", "whole"])
@pytest.mark.parametrize("made", [lambda: "text", lambda: None, raises, exits, interrupts])
def test_a_reply_that_is_no_bytes_ends_with_an_error(
    name: str, made: Any, strange_server: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets 500 or a last event, never a cut or empty reply; the log names package, route and method."""
    Odd.odd[name] = made
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        reply = strange_server.post("/loose/say", {"stream": name != "whole"})
    assert f"{WHO}: /loose/say: Odd.{name}()" in caplog.text or "no words" in caplog.text
    if name in ("step", "whole", "open"):
        assert reply.status_code == 500
    else:
        told = ("log has the details under this id", "possible: bytes", "possible: RequestError for what is not served")
        assert reply.text.endswith(tuple(f'{end}"\n\n' for end in told))
    Odd.odd.clear()
    assert strange_server.post("/loose/say", {}).status_code == 200
    assert strange_server.state.num_live == 0


@pytest.mark.parametrize("made", [lambda: "text", lambda: None, raises])
def test_a_stream_that_cannot_tell_of_its_end_tells_it_in_this_servers_words(
    made: Any, strange_server: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Where `failed` of a writer raises or gives no bytes, the last event is the server's."""
    Odd.odd.update(close=raises, failed=made)
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        reply = strange_server.post("/loose/say", {"stream": True})
    last = reply.text.split("\n\n")[-2]
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.partition("data: ")[2])["error"]["code"] == "plugin_failed"
    assert f"{WHO}: /loose/say: Odd.failed() cannot tell of an error" in caplog.text


def test_a_whole_reply_of_nothing_is_an_error(strange_server: Harness) -> None:
    """An empty 200 is no JSON."""
    Odd.odd["whole"] = lambda: b""
    assert strange_server.post("/loose/say", {}).status_code == 500


@pytest.mark.parametrize("name", ["open", "step", "whole"])
def test_a_piece_of_a_reply_has_a_bound(name: str, strange_server: Harness) -> None:
    """One of 300 MB kept all others waiting for eight seconds, until the client had taken it."""
    Odd.odd[name] = lambda: bytes(MAX_PIECE + 1)
    reply = strange_server.post("/loose/say", {"stream": name != "whole"})
    text = f"{WHO}: /loose/say: Odd.{name}() returned {MAX_PIECE + 1} bytes at once; possible: {MAX_PIECE}"
    assert reply.json()["error"]["message"] == text


def changes(reply: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What a writer may try to change of what it is given, and what that raises, if anything."""
    yield "AttributeError", lambda: reply.choices.clear()
    yield "AttributeError", lambda: reply.choices.append(None)
    yield "AttributeError", lambda: reply.requests.clear()
    yield "AttributeError", lambda: reply.choices.insert(0, None)
    for name in ("num_cached", "finished_at", "request", "prompt_index", "output", "submit"):
        yield "AttributeError", lambda name=name: setattr(reply.choices[0], name, None)  # type: ignore[misc]
    for name in ("choices", "requests", "tokenizer", "model", "id", "is_kept"):
        yield "", lambda name=name: setattr(reply, name, None)  # type: ignore[misc]


NUM_CHANGES = len(list(changes(None)))


class Changing(Says):
    """Changes what it is given as soon as it has it."""

    which, place = 0, "init"

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.kept = reply.choices
        self.does("init")

    def does(self, place: str) -> None:
        if place == self.place:
            list(changes(self.reply))[self.which][1]()

    def step(self, steps: Sequence[StepView]) -> bytes:
        self.does("step")
        assert all(step.choice is self.kept[step.choice.index] for step in steps)
        return b"data: {}\n\n"

    def take(self, steps: Sequence[StepView]) -> None:
        self.does("step")

    def whole(self) -> bytes:
        self.does("whole")
        return msgspec.json.encode([choice.text for choice in self.kept])


@pytest.mark.parametrize(
    ("place", "is_stream"), [("init", False), ("init", True), ("step", False), ("step", True), ("whole", False)]
)
def test_what_a_writer_is_given_is_not_its_own(
    place: str, is_stream: bool, make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To empty or set it is refused by name, or changes its copy alone; the server's counts go on."""
    api = Strange()
    route = replace_route(api.routes()[0], writer=Changing)
    served = make_harness(apis=(*BUILT_IN, Guarded(api, WHO, [route])))
    monkeypatch.setattr(Changing, "place", place)
    for which in range(NUM_CHANGES):
        monkeypatch.setattr(Changing, "which", which)
        error = list(changes(None))[which][0]
        reply = served.post("/loose/say", {"stream": is_stream})
        if error:
            assert (reply.status_code, reply.json()["error"]["code"]) == (500, "plugin_failed")
            assert reply.json()["error"]["message"].startswith(f"{WHO}: /loose/say: Changing")
            assert f"() raised {error}; possible" in reply.json()["error"]["message"]
        else:
            assert reply.status_code == 200
            assert reply.content == (b"data: {}\n\n" * reply.text.count("{}") if is_stream else b'["He"]')
    assert served.state.num_live == 0
    tally = served.state.metrics.tally
    served.eventually(lambda: tally.num_requests == tally.finished.total())


@pytest.mark.parametrize("made", [raises, exits, interrupts])
def test_a_writer_that_cannot_begin_is_told_by_name(
    made: Callable[[], bytes], strange_server: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `__init__`, and `take`, which a whole reply is told with."""
    for name, what in (("__init__", "Odd()"), ("take", "Odd.take()")):
        with monkeypatch.context() as patched:
            patched.setattr(Odd, name, lambda *args: made())
            told = strange_server.post("/loose/say", {}).json()["error"]
        assert told["message"].startswith(f"{WHO}: /loose/say: {what} raised ")
    assert strange_server.post("/loose/say", {}).status_code == 200


@pytest.mark.parametrize("made", [raises, exits, interrupts])
def test_a_writer_that_fails_at_a_failure_ends_its_stream(
    made: Callable[[], bytes],
    strange_server: Harness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`fail` is asked once something has been sent; the end says that it raised."""
    pieces = iter([lambda: b"data: {}\n\n"])
    Odd.odd["step"] = lambda: next(pieces, made)()
    monkeypatch.setattr(Odd, "fail", lambda self, failure: made())
    reply = strange_server.post("/loose/say", {"stream": True})
    assert reply.text.startswith("data: {}\n\n")
    assert f"{WHO}: /loose/say: Odd.fail() raised " in reply.text.split("\n\n")[-2]


def test_what_a_writer_says_of_itself_is_its_classes(
    make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A media type or words for silences that one reply sets are not looked at: they become headers and bytes."""

    class Turned(Says):
        def __init__(self, reply: Reply) -> None:
            super().__init__(reply)
            self.media_type, self.keep_alive = None, 5  # type: ignore[misc, assignment]

    api = Strange()
    served = make_harness(
        apis=(*BUILT_IN, Guarded(api, WHO, [replace_route(api.routes()[0], writer=Turned)])), stream_keep_alive=0.01
    )
    served.engine.delay_s = 0.05
    reply = served.post("/loose/say", {"stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert ": keep-alive" in reply.text
