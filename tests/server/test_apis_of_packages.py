"""What a package's API lets pass, or does wrong, costs its own request and nothing else."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace as replace_route
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from harness import Harness
from msgspec.structs import replace

from dovetail.contracts.api import Api, Route, ServerFacts, View
from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.replies import Failure, StepView, Writer
from dovetail.contracts.requests import Chat, Cut, Ids, JsonObject, Names, Request, Sampling, Text, Tools
from dovetail.plugins import PlannedPlugin, PluginPlan
from dovetail.processing.apis import routes_of
from dovetail.processing.checked import OF_REQUEST, checked
from dovetail_server.apis.chat.schema import ChatRequest
from dovetail_server.apis.completions.schema import CompletionRequest
from dovetail_server.apis.guarded import MAX_PIECE, Guarded
from dovetail_server.apis.loaded import made as apis_made
from dovetail_server.apis.routes import BUILT_IN
from dovetail_server.apis.watch import WATCH
from dovetail_server.app import check_apis

ONE = Request(prompts=[Text(text="a")], limit=2)
NAMES = Names(limit="options.most", prompt="input", renamed={"temperature": "options.temperature"})


class Says(Writer):
    def step(self, steps: Sequence[StepView]) -> bytes:
        return b"data: {}\n\n"

    def whole(self) -> bytes:
        return msgspec.json.encode([choice.text for choice in self.reply.choices])

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        return b"data: " + msgspec.json.encode(failure.message) + b"\n\n"


class Loose(Api):
    """Makes of any body what the test says."""

    owns: ClassVar[tuple[str, ...]] = ("/loose",)
    made: Any = ONE
    status: Any = None

    def routes(self) -> Sequence[Route | View]:
        return (
            Route(name="loose_say", path="/loose/say", about="Say it.", read=lambda body: self.made, writer=Says),
            View(name="loose_show", path="/loose/show", about="Show it.", show=lambda facts, body: {"a": 1}),
        )

    def failed(self, failure: Failure, request_id: str | None) -> tuple[int, Any]:
        if self.status is None:
            raise KeyError("no words")
        return self.status, {"loose": failure.message, "param": failure.param}


def chat(*messages: Any, **fields: Any) -> list[Any]:
    return [Chat(messages=list(messages), **fields)]


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": Sampling(**fields)}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 10**9}),
    ("n", {"n": 0}),
    ("n", {"n": "3"}),
    ("candidates", {"candidates": -1}),
    ("max_tokens", {"limit": -1}),
    ("max_tokens", {"limit": 1.5}),
    ("max_tokens", {"limit": True}),
    ("options.most", {"limit": 1.5, "names": NAMES}),
    ("options.most", {"limit": 1 << 40, "names": NAMES}),
    ("needs_context", {"needs_context": "3"}),
    ("priority", {"priority": 1.5}),
    ("priority", {"priority": 1 << 31}),
    (None, {"priority": 1 << 70}),
    ("logprobs", {"logprobs": 0.5}),
    ("prompt_logprobs_start", {"prompt_logprobs": 1, "prompt_logprobs_start": 0.5}),
    ("logprob_token_ids", {"logprobs": 1, "named_ids": [True]}),
    ("logprob_token_ids", {"logprobs": 1, "named_ids": [1] * 5000}),
    ("thinking_budget", {"thinking_budget": -1}),
    ("temperature", sampling(temperature=math.nan)),
    ("options.temperature", sampling(temperature=-1.0) | {"names": NAMES}),
    ("repetition_penalty", sampling(repetition_penalty=0.0)),
    ("top_k", sampling(top_k=1.5)),
    (None, sampling(seed=1 << 70)),
    ("seed", sampling(seed=1 << 63)),
    ("stop_token_ids", sampling(stop_token_ids=[1] * 257)),
    ("allowed_token_ids", sampling(allowed_token_ids=[])),
    ("bad_words", sampling(bad_words=[""])),
    ("logit_bias", sampling(logit_bias={"1": math.nan})),
    ("logit_bias", sampling(logit_bias={"1": -math.inf})),
    ("logit_bias", sampling(logit_bias={"9" * 5000: 1.0})),
    ("cache_salt", {"cache_salt": "x" * 513}),
    (None, {"cache_salt": "\ud800"}),
    (None, {"grammar": {"json_schema": {"const": "\ud800"}}}),
    ("grammar", {"grammar": []}),
    ("grammar", {"grammar": {"zork": 1}}),
    ("candidates", {"candidates": 1, "n": 3}),
    ("candidates", {"candidates": 3, "stream": True}),
    ("metadata", {"keeps": {str(n): "a" for n in range(20)}}),
    ("metadata", {"keeps": {"a": "b" * 513}}),
    ("metadata", {"keeps": {"a" * 65: "b"}}),
    ("rid", {"rid": "a\nb"}),
    ("prompt", {"cut": Cut(most=-2)}),
    ("prompt", {"prompts": []}),
    ("input", {"prompts": [Text(text="")], "names": NAMES}),
    ("prompt", {"prompts": [Text(text=5)]}),  # type: ignore[arg-type]
    ("prompt", {"prompts": [Ids(ids=[1, True])]}),
    ("prompt", {"prompts": [Ids(ids=[10**9])]}),
    ("prompt", {"prompts": [Ids(ids=[1 << 70])]}),
    ("prompt", {"prompts": chat({"content": "a"})}),
    ("prompt", {"prompts": chat({"role": "user", "content": 5})}),
    ("prompt", {"prompts": chat({"role": "user", "content": "a"}, input_ids=[])}),
    ("tools", {"prompts": chat({"role": "user"}), "tools": Tools(tools=[{"type": "function"}])}),
    ("tools", {"prompts": chat({"role": "user"}), "tools": Tools(tools=[{"function": {"name": 5}}])}),
]


@pytest.fixture
def api() -> Loose:
    return Loose()


@pytest.fixture
def served(api: Loose, make_harness: Callable[..., Harness]) -> Harness:
    return make_harness(apis=(*BUILT_IN, Guarded(api, WHO, routes_of(api))))


def test_what_no_request_may_have_is_refused(api: Loose, served: Harness) -> None:
    """Numbers, types and forms that an adapter lets pass are refused by name, before the engine has them."""
    api.status = 400
    for param, fields in WRONG:
        api.made = replace(ONE, **fields)
        reply = served.post("/loose/say", {})
        assert (reply.status_code, reply.json()["param"]) == (400, param), (fields, reply.text)
        assert len(reply.text) < 1000, fields
        assert not served.engine.submits, fields
    api.made = ONE
    assert served.post("/loose/say", {}).status_code == 200


def test_a_right_request_stays_as_it_is() -> None:
    """What is checked is the same afterwards, whatever there is to say."""
    for request in (
        ONE,
        replace(ONE, prompts=[Ids(ids=[1, 2], tail="a"), Text(text="b", suffix="c")], n=128, logprobs=-1),
        replace(ONE, sampling=Sampling(temperature=0.0, logit_bias={5: 1.0, "6": -1.0}, seed=-1, stop="a")),
        Request(
            prompts=chat({"role": "user", "content": [{"type": "text", "text": "a"}], "more": {"a": [1]}}),
            tools=Tools(tools=[{"type": "function", "function": {"name": "f", "strict": True}, "more": 1}]),
            grammar={"regex": "a"},
            keeps={"a": "b"},
            reply={"a": [1, {"b": None}]},
        ),
    ):
        assert checked(request, "read()") == [request]


def test_an_object_of_a_client_may_hold_whole_numbers_of_any_length() -> None:
    """JSON Schemas do, in grammars and in tools; they are passed on, not copied."""
    schema = {"type": "integer", "maximum": 1 << 70}
    tools = Tools(tools=[{"function": {"name": "f", "parameters": schema}}])
    (made,) = checked([replace(ONE, grammar={"json_schema": schema}, tools=tools)], "read()")
    assert made.grammar["json_schema"] is schema
    assert made.tools == tools


def test_bounds_are_those_of_the_http_api() -> None:
    """A field that bodies have, too, is bounded alike there."""
    for model, names in (
        (ChatRequest, {"n": "n", "priority": "priority"}),
        (CompletionRequest, {"candidates": "best_of"}),
    ):
        properties = model.model_json_schema()["properties"]
        for name, field in names.items():
            [number] = [form for form in properties[field]["anyOf"] if form["type"] == "integer"]
            assert (number["minimum"], number["maximum"]) == OF_REQUEST[name]


STRANGE: list[tuple[Any, str]] = [
    *[
        (made, f"returned {made!r}; possible: a Request, or a list of them")
        for made in (None, [], "abc", {"a": 1}, [None])
    ],
    ([ONE, None], "possible: a Request, or a list of them"),
    ((ONE,), "possible: a Request, or a list of them"),
    (replace(ONE, reply={"a": object()}), "an object in reply (Encoding objects of type object is unsupported)"),
    (replace(ONE, grammar={"regex": {1, object()}}), "an object in grammar"),
    (replace(ONE, names=None), "whose names is None; possible: a Names"),  # type: ignore[arg-type]
    (replace(ONE, names={"prompt": "a"}), "whose names is {'prompt': 'a'}"),  # type: ignore[arg-type]
    (replace(ONE, names=Names(prompt=5)), "Expected `str`, got `int` - at `$.prompt`"),  # type: ignore[arg-type]
    (replace(ONE, names=Names(renamed=None)), "at `$.renamed`"),  # type: ignore[arg-type]
    (replace(ONE, names=Names(renamed={"a": 5})), "at `$.renamed[...]`"),  # type: ignore[dict-item]
    (replace(ONE, sampling=None), "whose sampling is None; possible: a Sampling"),  # type: ignore[arg-type]
    (replace(ONE, tools=[]), "whose tools is []; possible: a Tools, or None"),  # type: ignore[arg-type]
    (replace(ONE, cut=5), "whose cut is 5; possible: a Cut, or None"),  # type: ignore[arg-type]
    (replace(ONE, prompts="abc"), "whose prompts is 'abc'; possible: a list of Chat, Text and Ids"),  # type: ignore[arg-type]
    (replace(ONE, prompts=["abc"]), "whose prompts is ['abc']"),  # type: ignore[list-item]
    (replace(ONE, dropped=None), "whose dropped is None; possible: a list of Dropped"),  # type: ignore[arg-type]
    (replace(ONE, dropped=["web"]), "whose dropped is ['web']"),  # type: ignore[list-item]
]


def test_what_is_no_request_is_told_by_package_field_and_what_is_possible(
    api: Loose, served: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader that returns something else gets a 500 that says what it was, and so does the log."""
    api.status = 500
    for made, why in STRANGE:
        api.made = made
        caplog.clear()
        with caplog.at_level(logging.ERROR, "dovetail.server"):
            reply = served.post("/loose/say", {})
        assert reply.status_code == 500
        text = reply.json()["loose"]
        assert text.startswith(f"{WHO}: /loose/say: read() returned "), text
        assert why in text
        assert "; possible: " in text
        assert why in caplog.text
    api.made = ONE
    assert served.post("/loose/say", {}).status_code == 200


def test_prompts_of_a_body_want_some_things_alike(api: Loose, served: Harness) -> None:
    """Only the first request's model, stream and metadata could be used, so that others are refused by name."""
    api.status = 400
    for name, value in {"stream": True, "model": "tiny-too", "keeps": {}}.items():
        api.made = [ONE, replace(ONE, **{name: value})]
        reply = served.post("/loose/say", {})
        assert (reply.status_code, reply.json()["param"]) == (400, name)


def test_prompts_have_identifiers_of_their_own(api: Loose, served: Harness) -> None:
    """Requests of one body that claim one identifier are refused: the server counts by it."""
    api.status = 400
    for other in ("a", "a#0"):
        api.made = [replace(ONE, rid="a", n=2 if other == "a#0" else 1), replace(ONE, rid=other)]
        reply = served.post("/loose/say", {})
        assert (reply.status_code, reply.json()["param"]) == (400, "rid")
    assert served.state.num_live == 0


@pytest.mark.parametrize("status", [None, "400", 200, 99, 9999, True])
def test_an_error_reaches_the_client_whatever_its_api_does(
    status: Any, api: Loose, served: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Where `failed` raises or gives no status of an error, the client reads this server's words, and the log tells."""
    api.status, api.made = status, replace(ONE, model="nobody")
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        reply = served.post("/loose/say", {})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert f"{WHO}.failed()" in caplog.text


def test_a_refusal_has_the_status_of_an_error() -> None:
    """Any other could not be sent, or would be read as a reply."""
    for status in (200, 302, 99, 999):
        with pytest.raises(ValueError, match="possible: 400 to 599"):
            RequestError("no", status=status)


def test_foreign_errors_are_not_described_as_ours(served: Harness) -> None:
    """On a path that an API owns the OpenAPI document claims no form of errors that nobody described."""
    paths = served.get("/openapi.json").json()["paths"]
    for path, method in (("/loose/say", "post"), ("/loose/show", "get")):
        route = paths[path][method]
        assert route["responses"]["4XX"]["content"]["application/json"]["schema"] == {}
        assert route["tags"] == ["plugins"]


@pytest.mark.parametrize("kept", [(), BUILT_IN[:1], BUILT_IN[1:]])
def test_the_document_has_what_is_served(kept: tuple[Api, ...], make_harness: Callable[..., Harness]) -> None:
    """Whatever `--apis` leaves out, as the tutorial's package does, the page and its examples are of the others."""
    served = make_harness(apis=(*kept, Loose()))
    paths = served.get("/openapi.json").json()["paths"]
    assert "/loose/say" in paths
    assert ("post" in paths["/v1/chat/completions"]) is (BUILT_IN[0] in kept)
    assert served.get("/docs").status_code == 200


class OneView(Api):
    view: ClassVar[dict[str, Any]] = {}

    def routes(self) -> Sequence[Route | View]:
        def show(facts: ServerFacts, body: JsonObject) -> JsonObject:
            return {}

        return [View(**{"name": "one", "path": "/one", "about": "One.", "show": show} | self.view)]


def with_view(**fields: Any) -> Api:
    return type("Faulty", (OneView,), {"view": fields})()


def with_route(**fields: Any) -> Api:
    route: dict[str, Any] = {"name": "one", "path": "/one", "about": "One.", "read": print, "writer": Says}
    return type("Faulty", (Loose,), {"routes": lambda self: [Route(**route | fields)], "owns": ()})()


def owning(owns: Any) -> Api:
    return type("Faulty", (Loose,), {"owns": owns})()


class Twin(msgspec.Struct):
    """The first of two schemas of one name."""


def other_twin() -> type[msgspec.Struct]:
    return msgspec.defstruct("Twin", [("a", int)], module=__name__)


def faults() -> Iterator[tuple[Api, str]]:
    yield type("Faulty", (Loose,), {"routes": lambda self: None})(), r"routes\(\) returned NoneType"
    yield with_view(path="/{any:path}"), "neither parameters"
    yield with_view(path="one"), "begins with /"
    yield with_view(about=""), "about is ''"
    yield with_view(method="PUT"), "possible: GET, POST"
    yield with_view(show=None), "give a function"
    yield with_view(error=dict), "give a msgspec.Struct"
    yield with_route(writer=dict), "give a class made of"
    yield with_route(writer=Writer), "does not implement failed, step, whole"
    yield with_route(writer=type("Odd", (Says,), {"keep_alive": ""})), "keep_alive must be bytes"
    yield with_route(writer=type("Odd", (Says,), {"keep_alive": bytes(2000)})), "at most 1024"
    yield with_route(writer=type("Odd", (Says,), {"media_type": "text/x\r\nset-cookie: a=b"})), "media_type is"
    yield with_route(writer=type("Odd", (Says,), {"media_type": ""})), "media_type is"
    yield with_route(id_prefix="\ud800"), "id_prefix is"
    yield with_route(about="\ud800"), "about is"
    yield with_route(tag="a\nb"), "tag is"
    yield with_route(body=dict), "give a pydantic model"
    yield with_route(read="read"), "give a function"
    yield with_route(place="moon"), "possible: prefix, any"
    yield with_route(reply=Twin, error=other_twin()), "two schemas are called Twin"
    yield owning("/loose"), "give paths in a tuple"
    yield owning(("/",)), "more behind it"
    yield owning(("loose",)), "begins with /"
    yield type("Faulty", (OneView,), {"owns": ("/one",)})(), r"has no failed\(\)"


@pytest.mark.parametrize(("api", "why"), list(faults()))
def test_an_api_that_cannot_be_served_is_refused(api: Api, why: str) -> None:
    """What the server would stumble over later is said before it starts; the kit asks the same function."""
    with pytest.raises(ValueError, match=why):
        routes_of(api)


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "/health"},
        {"path": "/livez", "method": "POST"},
        {"path": "/metrics", "method": "POST"},
        {"path": "/v1/models/mine"},
        {"name": "create_response"},
        {"name": "tokenize"},
    ],
)
def test_an_api_replaces_nothing_of_the_server(fields: dict[str, str]) -> None:
    """A path or a name that the server has itself stays the server's, with any method: some need no key."""
    with pytest.raises(PluginError, match="the server's own"):
        check_apis([*BUILT_IN, with_view(**fields)])


WHO = "api 'loose' of acme 1.0"


class Odd(Says):
    """Does what the test says in one of its methods."""

    odd: ClassVar[dict[str, Callable[[], Any]]] = {}

    def open(self) -> bytes:
        return self.does("open", b"")

    def close(self) -> bytes:
        return self.does("close", b"data: end\n\n")

    def step(self, steps: Sequence[StepView]) -> bytes:
        return self.does("step", super().step(steps))

    def whole(self) -> bytes:
        return self.does("whole", super().whole())

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        return cls.does("failed", super().failed(failure, request_id))

    @classmethod
    def does(cls, name: str, otherwise: bytes) -> bytes:
        made: bytes = cls.odd[name]() if name in cls.odd else otherwise
        return made


class Strange(Loose):
    """As `Loose`, with a writer of the test's; its reader calls what the test gives it."""

    owns: ClassVar[tuple[str, ...]] = ()

    def routes(self) -> Sequence[Route | View]:
        def read(body: Any) -> Request:
            made: Request = self.made() if callable(self.made) else self.made
            return replace(made, stream=body.get("stream", False))

        return (Route(name="loose_say", path="/loose/say", about="Say it.", read=read, writer=Odd),)


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch) -> Strange:
    monkeypatch.setattr(Odd, "odd", {})
    return Strange()


@pytest.fixture
def guarded(strange: Strange, make_harness: Callable[..., Harness]) -> Harness:
    return make_harness(apis=(*BUILT_IN, Guarded(strange, WHO, routes_of(strange))))


def raises() -> bytes:
    raise KeyError("no words")


def exits() -> bytes:
    raise SystemExit(3)


def interrupts() -> bytes:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, StopIteration, StopAsyncIteration, GeneratorExit]
)
def test_what_would_end_more_than_a_request_is_told(error: type[BaseException], guarded: Harness) -> None:
    """An exception for processes, tasks and loops ends none of them, and no request is left without an answer."""

    def ends() -> bytes:
        raise error

    Odd.odd["whole"] = ends
    reply = guarded.post("/loose/say", {})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "plugin_failed")
    text = f"{WHO}: /loose/say: Odd.whole() raised {error.__name__}; possible: RequestError for what is not served"
    assert reply.json()["error"]["message"] == text


def test_a_route_that_only_streams_has_requests_that_do(strange: Strange, make_harness: Callable[..., Harness]) -> None:
    """A whole reply there is the package's fault, which the error names."""
    [route] = [replace_route(route, only_streams=True) for route in strange.routes()]
    served = make_harness(apis=(*BUILT_IN, Guarded(strange, WHO, [route])))
    assert served.post("/loose/say", {"stream": True}).status_code == 200
    assert "whose stream is False; possible: True" in served.post("/loose/say", {}).json()["error"]["message"]


def test_a_writer_may_give_its_bytes_in_any_form(guarded: Harness) -> None:
    """A buffer that it wrote into, or a view of one."""
    for made in (bytearray(b"[1]"), memoryview(b"[1]")):
        Odd.odd["whole"] = lambda made=made: made
        assert guarded.post("/loose/say", {}).json() == [1]


@pytest.mark.parametrize("name", ["open", "step", "close", "whole"])
@pytest.mark.parametrize("made", [lambda: "text", lambda: None, raises, exits, interrupts])
def test_a_reply_that_is_no_bytes_ends_with_an_error(
    name: str, made: Any, guarded: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets 500 or a last event, never a cut or empty reply; the log names package, route and method."""
    Odd.odd[name] = made
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        reply = guarded.post("/loose/say", {"stream": name != "whole"})
    assert f"{WHO}: /loose/say: Odd.{name}()" in caplog.text or "no words" in caplog.text
    if name in ("step", "whole", "open"):
        assert reply.status_code == 500
    else:
        told = ("log has the details under this id", "possible: bytes", "possible: RequestError for what is not served")
        assert reply.text.endswith(tuple(f'{end}"\n\n' for end in told))
    Odd.odd.clear()
    assert guarded.post("/loose/say", {}).status_code == 200
    assert guarded.state.num_live == 0


@pytest.mark.parametrize("made", [lambda: "text", lambda: None, raises])
def test_a_stream_that_cannot_tell_of_its_end_tells_it_in_this_servers_words(
    made: Any, guarded: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Where `failed` of a writer raises or gives no bytes, the last event is the server's."""
    Odd.odd.update(close=raises, failed=made)
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        reply = guarded.post("/loose/say", {"stream": True})
    last = reply.text.split("\n\n")[-2]
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.partition("data: ")[2])["error"]["code"] == "plugin_failed"
    assert f"{WHO}: /loose/say: Odd.failed() cannot tell of an error" in caplog.text


def test_a_whole_reply_of_nothing_is_an_error(guarded: Harness) -> None:
    """An empty 200 is no JSON."""
    Odd.odd["whole"] = lambda: b""
    assert guarded.post("/loose/say", {}).status_code == 500


@pytest.mark.parametrize("name", ["open", "step", "whole"])
def test_a_piece_of_a_reply_has_a_bound(name: str, guarded: Harness) -> None:
    """One of 300 MB kept all others waiting for eight seconds, until the client had taken it."""
    Odd.odd[name] = lambda: bytes(MAX_PIECE + 1)
    reply = guarded.post("/loose/say", {"stream": name != "whole"})
    text = f"{WHO}: /loose/say: Odd.{name}() returned {MAX_PIECE + 1} bytes at once; possible: {MAX_PIECE}"
    assert reply.json()["error"]["message"] == text


class Mean(BaseException):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("error", [Mean(), ValueError("x"), PluginError("x"), TimeoutError(), MemoryError()])
@pytest.mark.parametrize("place", ["read", "whole"])
def test_whatever_is_raised_is_told_by_name(
    place: str, error: BaseException, strange: Strange, guarded: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Of any class, with any text: the client reads whose call it was, and the log has the traceback."""

    def fails() -> Any:
        raise error

    if place == "read":
        strange.made = fails
    else:
        Odd.odd["whole"] = fails
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        told = guarded.post("/loose/say", {}).json()["error"]
    assert told["code"] == "plugin_failed"
    assert f"{place}() raised {type(error).__name__}; possible" in told["message"]
    assert told["message"].startswith(WHO)
    assert "in fails" in caplog.text


@pytest.mark.parametrize(
    "change",
    [{"param": 5}, {"code": [1]}, {"message": b"x"}, {"message": "\ud800"}, {"status": 200}, {"status": 400.5}],
)
def test_a_refusal_that_cannot_be_told_is_the_packages_fault(
    change: dict[str, Any], strange: Strange, guarded: Harness
) -> None:
    """Its parts are what a client, a batch's line and another process are sent."""

    def refuses() -> Any:
        error = RequestError("no")
        for name, value in change.items():
            setattr(error, name, value)
        raise error

    strange.made = refuses
    told = guarded.post("/loose/say", {}).json()["error"]
    assert told["code"] == "plugin_failed"
    assert told["message"].startswith(f"{WHO}: /loose/say: read() raised a RequestError that cannot be told: ")


@pytest.mark.parametrize("at", ["init", "routes"])
def test_a_start_names_who_raised(at: str) -> None:
    """Also what is no `Exception`, and a class that wants arguments."""

    class Bad(Loose):
        def __init__(self, *, need: int) -> None:
            """Want an argument."""

    class Worse(Loose):
        def routes(self) -> Sequence[Route | View]:
            raise Mean

    kind = Bad if at == "init" else Worse
    target = f"{__name__}:{kind.__name__}"
    planned = PlannedPlugin(kind="api", name="bad", distribution="acme", version="1.0", target=target, api=1, roles=[])
    loaded: Any = SimpleNamespace(
        plan=PluginPlan(plugins=(planned,)), candidates=lambda kind_: [(planned, kind)], watched=lambda _: nullcontext()
    )
    with pytest.raises(PluginError, match=r"api 'bad' of acme 1\.0: "):
        apis_made(loaded)


def test_an_api_tells_of_no_errors_of_the_server(strange: Strange) -> None:
    """A probe's reply is not a package's."""
    with pytest.raises(PluginError, match=re.escape(f"{WHO} tells of errors on /livez, which is")):
        check_apis([*BUILT_IN, Guarded(type("Owner", (Strange,), {"owns": ("/livez",)})(), WHO, strange.routes())])


def test_names_that_are_no_regular_expression_are_told(
    strange: Strange, guarded: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first request, also one that is served: refusals would otherwise be 500 one day."""
    strange.made = replace(ONE, names=Names(renamed={"a(": "b"}))
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        assert guarded.post("/loose/say", {}).status_code == 500
    assert f"{WHO}: /loose/say: read() returned a Request whose names are Names(" in caplog.text
    assert "missing ), unterminated subpattern" in caplog.text


def for_ever() -> Any:
    while True:
        sum(range(100))


def stubborn() -> Any:
    """Catch the first exception that ends it."""
    try:
        for_ever()
    except BaseException:
        for_ever()


@pytest.mark.parametrize(
    ("name", "is_stream"), [("read", False), ("step", True), ("whole", False), ("stubborn", False)]
)
def test_what_does_not_end_is_ended(
    name: str,
    is_stream: bool,
    strange: Strange,
    guarded: Harness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A reader or a writer that loops costs its own request; the log says which, and where it stood."""
    monkeypatch.setattr(WATCH, "limit_s", 1.0)
    if name in ("read", "stubborn"):
        strange.made = for_ever if name == "read" else stubborn
    else:
        Odd.odd[name] = for_ever
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        reply = guarded.post("/loose/say", {"stream": is_stream})
    assert reply.status_code == 500
    assert "did not end within 1 s and is ended; it stood at" in caplog.text
    assert "in for_ever" in caplog.text
    assert WHO in caplog.text
    strange.made = ONE
    Odd.odd.clear()
    assert guarded.post("/loose/say", {}).status_code == 200
