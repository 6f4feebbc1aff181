"""Ollama's own client, unchanged, against `dovetail serve --apis …,ollama` with the example package installed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import ollama
import pytest
import requests
from gateway_process import KEY, RESUME, Served
from harness import Harness

from dovetail.contracts.output import Event
from dovetail.messages import TokenDelta
from dovetail.text.parsing.stream import OutputStream
from dovetail_parsers.tools.hermes import HermesTools
from dovetail_server.apis.routes import BUILT_IN
from dovetail_testing import FakeSite

EXAMPLE = Path(__file__).parents[2] / "docs/examples/dovetail-ollama"
MODEL = "dovetail-demo"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
COLD = {"temperature": 0, "num_predict": 60}
APIS = ("--apis", "openai,anthropic,sglang,ollama", "--random-seed", "1", "--num-threads", "1")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example as an installed package, for processes that start here."""
    folder = tmp_path_factory.mktemp("site")
    FakeSite(folder).add(
        "dovetail-ollama", entry_points={"dovetail.apis.v1": {"ollama": "dovetail_ollama.reply:Ollama"}}
    )
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), str(EXAMPLE), before)))
    yield folder
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def served(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    flags = ("--min-free-disk-bytes", "0", "--file-storage-path", str(folder / "files"), "--api-key", KEY)
    running = Served(folder, "serve", *APIS, *flags, "--stream-keep-alive", "0.2")
    try:
        yield running.wait()
    finally:
        running.close()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[ollama.Client]:
    with ollama.Client(host=served.base, headers={"authorization": f"Bearer {KEY}"}) as made:
        yield made


def get_current_weather(city: str) -> str:
    """Get the current weather in a city

    Args:
        city: The city
    """
    return f"sunny in {city}"


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.message.content or "" for chunk in chunks)


def test_a_chat_and_its_stream(client: ollama.Client) -> None:
    """Whole and streamed, it is the same reply; the last line counts tokens and times."""
    whole = client.chat(MODEL, FRANCE, think=False, options=COLD)
    chunks = list(client.chat(MODEL, FRANCE, think=False, options=COLD, stream=True))
    assert "Paris" in (whole.message.content or "")
    assert text_of(chunks) == whole.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    assert (last.done_reason, last.eval_count, last.prompt_eval_count) == (
        whole.done_reason,
        whole.eval_count,
        whole.prompt_eval_count,
    )
    assert whole.done_reason == "stop"
    for reply in (whole, last):
        assert reply.total_duration is not None
        assert reply.prompt_eval_duration is not None
        assert reply.eval_duration is not None
        assert reply.load_duration == 0
        assert reply.prompt_eval_duration > 0 < reply.eval_duration
        assert abs(reply.prompt_eval_duration + reply.eval_duration - reply.total_duration) <= 2


def test_a_limit_and_a_stop(client: ollama.Client) -> None:
    """`num_predict` ends a reply with `length`, a stop string with `stop`, and is no part of it."""
    short = client.chat(MODEL, FRANCE, think=False, options={**COLD, "num_predict": 2})
    assert (short.done_reason, short.eval_count) == ("length", 2)
    stopped = client.chat(MODEL, FRANCE, think=False, options={**COLD, "stop": [" is"]})
    assert (stopped.done_reason, stopped.message.content) == ("stop", "The capital of France")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_is_read(client: ollama.Client, stream: bool) -> None:
    """The client makes a tool of a function; arguments are an object; the conversation goes on with the result."""
    given: Any = {"tools": [get_current_weather], "think": False, "options": COLD}
    found = client.chat(MODEL, WEATHER, stream=stream, **given)
    messages = [chunk.message for chunk in found] if stream else [found.message]
    [call] = [call for message in messages for call in message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("get_current_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_name": call.function.name, "content": get_current_weather("Paris")}
    asking = {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]}
    after = client.chat(MODEL, [*WEATHER, asking, result], **given)
    assert after.message.content
    assert not after.message.tool_calls


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_thinking_is_a_field_of_its_own(client: ollama.Client, stream: bool) -> None:
    """`think: true` gives thinking beside the answer, `false` none."""
    question = [{"role": "user", "content": "What is 2^8?"}]
    options = {"temperature": 0, "num_predict": 1100}
    found = client.chat(MODEL, question, think=True, options=options, stream=stream)
    messages = [chunk.message for chunk in found] if stream else [found.message]
    assert "".join(message.thinking or "" for message in messages)
    assert "256" in "".join(message.content or "" for message in messages)
    off = client.chat(MODEL, question, think=False, options=options)
    assert off.message.thinking is None
    assert off.message.content


def test_a_format_is_kept(client: ollama.Client) -> None:
    """A JSON schema, and `json`."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    given: Any = {"think": False, "options": COLD}
    assert json.loads(client.chat(MODEL, FRANCE, format=schema, **given).message.content or "")["city"] in (
        "Oslo",
        "Rome",
    )
    assert isinstance(json.loads(client.chat(MODEL, FRANCE, format="json", **given).message.content or ""), dict)
    found = client.generate(MODEL, "The capital of France?", format=schema, **given)
    assert json.loads(found.response or "")["city"] in ("Oslo", "Rome")


def test_a_text_is_generated(client: ollama.Client) -> None:
    """Through the template with a system message, raw, streamed; log probabilities belong to the text."""
    given: Any = {"options": COLD, "think": False}
    whole = client.generate(MODEL, FRANCE[0]["content"], system="You answer questions.", **given)
    assert "Paris" in (whole.response or "")
    chunks = list(client.generate(MODEL, FRANCE[0]["content"], system="You answer questions.", stream=True, **given))
    assert "".join(chunk.response or "" for chunk in chunks) == whole.response
    raw = client.generate(MODEL, "The capital of France is", raw=True, options={**COLD, "num_predict": 3})
    assert "Paris" in (raw.response or "")
    told: Any = {"logprobs": True, "top_logprobs": 2, **given}
    one = client.generate(MODEL, FRANCE[0]["content"], **told)
    rows = list(one.logprobs or ())
    assert "".join(row.token for row in rows) == one.response
    assert all(len(row.top_logprobs or ()) == 2 and row.logprob <= 0 for row in rows)
    streamed = list(client.generate(MODEL, FRANCE[0]["content"], stream=True, **told))
    assert [row.token for chunk in streamed for row in chunk.logprobs or ()] == [row.token for row in rows]


def test_the_last_message_may_begin_the_reply(client: ollama.Client) -> None:
    """A conversation that ends with the assistant goes on from there."""
    begun = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    found = client.chat(MODEL, begun, options=COLD)
    assert (found.message.content or "").strip().startswith("Paris")


def test_what_loads_says_that_it_has(client: ollama.Client) -> None:
    """Without a prompt nothing is said: the model is there."""
    assert client.generate(MODEL, keep_alive="5m").done_reason == "load"
    loaded = client.chat(MODEL, [])
    assert (loaded.done_reason, loaded.message.content) == ("load", "")
    [line] = client.chat(MODEL, [], stream=True)
    assert (line.done, line.done_reason) == (True, "load")


def test_the_model_is_shown(client: ollama.Client, served: Served) -> None:
    """Its names, its facts, and this server's version."""
    [model] = client.list().models
    assert model.model == MODEL
    assert model.size is not None
    assert model.size > 10**6
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["Qwen3ForCausalLM.context_length"] == 2048
    assert shown.details is not None
    assert shown.details.quantization_level in ("float32", "bfloat16")
    assert "messages" in (shown.template or "")
    assert served.get("/api/version").json() == {"version": served.get("/version").json()["version"]}
    with pytest.raises(ollama.ResponseError, match="'other' not found; served: dovetail-demo") as caught:
        client.show("other")
    assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": "other"}, "'other' does not exist here; served: dovetail-demo"),
        ({"model": None}, "model: expected `str`, got `null`"),
        ({"messages": {}}, "messages: expected `array | null`, got `object`"),
        (
            {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]},
            "messages[0].images[0]: an image cannot be read",
        ),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"messages": [None]}, "messages[0]: expected `object`, got `null`"),
        ({"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ({"options": {"num_gpu": 1}}, "options.num_gpu is not supported"),
        ({"options": {"top_p": 1.5}}, "options.top_p: expected `float` <= 1.0"),
        ({"options": {"num_ctx": 1 << 20}}, "options.num_ctx asks for a context of 1048576 tokens"),
        ({"options": [1]}, "options: expected `object | null`, got `array`"),
        ({"keep_alive": 0}, "keep_alive is not supported: 0 unloads the model"),
        ({"keep_alive": "soon"}, "keep_alive must be seconds or a text such as '5m' (given: 'soon')"),
        ({"think": "much"}, "think must be true, false, 'low'"),
        ({"format": "xml"}, "format must be 'json' or a JSON schema (given: 'xml')"),
        ({"format": {"type": "objekt"}}, "format: JSON schema, /type"),
        ({"shift": True}, "shift is not supported"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs: true"),
        ({"max_tokens": 3}, "max_tokens: is not known; possible here: model, stream,"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_what_is_not_served_is_refused(served: Served, given: dict[str, Any], says: str) -> None:
    """By name, with what is possible, in Ollama's form, whether it would have been a stream or not."""
    for stream in (True, False):
        reply = served.post("/api/chat", {"model": MODEL, "messages": FRANCE, "stream": stream, **given})
        assert reply.json().keys() == {"error"}
        assert says in reply.json()["error"]
        assert reply.status_code == (404 if given.get("model") else 400)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"context": [1, 2]}, "context is not supported"),
        ({"images": ["aGk="]}, "images[0]: an image cannot be read here: this model is served for text only"),
        ({"images": ["aGk="], "raw": True}, "images need the model's chat template"),
        ({"width": 64}, "width is not supported"),
        ({"truncate": True}, "truncate is not supported"),
        ({"raw": True, "system": "s"}, "raw is a prompt without a template"),
        ({"raw": True, "think": True}, "think needs the model's chat template"),
        ({"suffix": "b"}, "suffix is not supported: this model has no tokens for filling in"),
        ({"prompt": 3}, "prompt: expected `str | null`, got `int`"),
    ],
)
def test_what_generate_does_not_serve(served: Served, given: dict[str, Any], says: str) -> None:
    """As of chat."""
    reply = served.post("/api/generate", {"model": MODEL, "prompt": "a", **given})
    assert reply.status_code == 400
    assert says in reply.json()["error"]


HOSTILE = {
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "text": b'"a"',
    "cut": b'{"model":',
    "deep": b'{"model":"m","format":' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    "deep lists": b"[" * 100_000,
    "nul": b'{"model":"m","prompt":"a\\u0000"}',
    "1 MB name": b'{"model":"%b"}' % (b"m" * (1 << 20)),
    "1 MB of options": b'{"model":"m","options":{%b"z":1}}' % b"".join(b'"o%d":1,' % i for i in range(90_000)),
    "1 MB of messages": b'{"model":"m","messages":[%b0]}' % (b"[]," * 350_000),
    "1 MB keep_alive": b'{"model":"m","keep_alive":"%b"}' % (b"1" * (1 << 20)),
    "1 MB field": b'{"model":"m","%b":1}' % (b"x" * (1 << 20)),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show"])
def test_hostile_bodies_are_refused(served: Served, name: str, path: str) -> None:
    """In Ollama's form, and with a short message; the server goes on."""
    headers = {"content-type": "application/json"}
    reply = served.session.post(served.base + path, data=HOSTILE[name], headers=headers, timeout=60)
    assert 400 <= reply.status_code < 500
    assert reply.json().keys() == {"error"}
    assert len(reply.text) < 4000
    assert served.get("/api/version").status_code == 200


def test_large_bodies_are_read_in_another_process(client: ollama.Client, served: Served) -> None:
    """Over 64 KiB: the oldest turns are dropped, or with `truncate: false` it is refused; other errors are as ever."""
    messages = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "ok"}] * 60 + FRANCE
    assert len(json.dumps(messages)) > 1 << 16
    found = client.chat(MODEL, messages, think=False, options=COLD)
    assert found.prompt_eval_count is not None
    assert 0 < found.prompt_eval_count < 2048
    body = {"model": MODEL, "messages": messages, "truncate": False}
    refused = served.post("/api/chat", body)
    assert refused.status_code == 400
    assert "maximum context length is 2048" in refused.json()["error"]
    wrong = served.post("/api/chat", {**body, "options": {"top_k": "a"}})
    assert wrong.json() == {"error": "options.top_k: expected `int | null`, got `str`"}


def test_a_missing_key_is_told_in_ollamas_form(served: Served) -> None:
    """Errors that no route has seen, too: no key, no route, a wrong method."""
    assert requests.post(served.base + "/api/chat", json={}, timeout=60).json().keys() == {"error"}
    reply = requests.get(served.base + "/api/tags", timeout=60)
    assert (reply.status_code, reply.json().keys()) == (401, {"error"})
    for found in (served.get("/api/chat"), served.post("/api/pull", {}), served.get("/api/nothing")):
        assert found.status_code in (404, 405)
        assert found.json().keys() == {"error"}
    other = served.post("/v1/chat/completions", {"messages": 3})
    assert isinstance(other.json()["error"], dict), "another API's errors are its own"


def test_a_client_that_leaves_frees_its_request(served: Served) -> None:
    """The engine stops what nobody reads."""
    body = {"model": MODEL, "messages": FRANCE, "options": {"num_predict": 1900, "seed": 1, "temperature": 5}}
    with served.post("/api/chat", body, stream=True) as reply:
        line = next(reply.iter_lines())
        assert json.loads(line)["done"] is False
    deadline = time.monotonic() + 120
    while f'dovetail_requests_running{{model_name="{MODEL}"}} 0.0' not in served.get("/metrics").text:
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.1)


@pytest.fixture
def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """A server of this process, whose engine says what it is told to."""
    monkeypatch.syspath_prepend(EXAMPLE)
    api = import_module("dovetail_ollama.reply").Ollama()
    made = Harness(folder, apis=(*BUILT_IN, api), tools=HermesTools())
    yield made
    made.close()


def test_a_stream_that_cannot_go_on_ends_with_the_error(scripted: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line has `error` and nothing else; a whole reply has a status."""
    feed = OutputStream.feed

    def broken(self: OutputStream, delta: TokenDelta) -> list[Event]:
        if self.num_tokens + len(delta.ids) > 3:
            raise IndexError("a parser's mistake")
        return feed(self, delta)

    monkeypatch.setattr(OutputStream, "feed", broken)
    scripted.text = "x" * 200
    body = {"model": "tiny", "messages": FRANCE}
    reply = scripted.post("/api/chat", body)
    *lines, last = map(json.loads, reply.text.splitlines())
    assert reply.status_code == 200
    assert [line["done"] for line in lines] == [False] * len(lines)
    assert last.keys() == {"error"}
    assert "mistake" not in last["error"]
    whole = scripted.post("/api/chat", {**body, "stream": False})
    assert (whole.status_code, whole.json().keys()) == (500, {"error"})
    assert scripted.state.num_live == 0


def test_no_schema_replaces_another(scripted: Harness) -> None:
    """Both APIs call something `Message`: in the OpenAPI document each refers to its own."""
    document = scripted.get("/openapi.json").json()
    schemas = document["components"]["schemas"]

    def at(reference: dict[str, str]) -> dict[str, Any]:
        properties: dict[str, Any] = schemas[reference["$ref"].removeprefix("#/components/schemas/")]["properties"]
        return properties

    sent = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    read = document["paths"]["/api/chat"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert "tool_call_id" in at(at(sent)["messages"]["items"])
    assert at(at(read)["message"]).keys() == {"role", "content", "thinking", "tool_calls"}


def test_arguments_that_are_cut_are_content(scripted: Harness) -> None:
    """What is no object cannot be `arguments`; it is not lost."""
    scripted.text = '<tool_call>\n{"name": "f", "arguments": {"city": "Par'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"model": "tiny", "messages": FRANCE, "tools": [tool], "options": {"num_predict": 400}}
    whole = scripted.post("/api/chat", {**body, "stream": False}).json()["message"]
    lines = [json.loads(line)["message"] for line in scripted.post("/api/chat", body).text.splitlines()]
    assert '{"city": "Par' in whole["content"]
    assert "".join(line["content"] for line in lines) == whole["content"]
    assert "tool_calls" not in whole


@pytest.fixture(scope="module")
def fleet(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("smg", reason="needs dovetail-llm[gateway]")
    folder = tmp_path_factory.mktemp("fleet")
    flags = ("--data-parallel-size", "2", "--device", "cpu", "--api-key", KEY, "--resume-key", RESUME)
    running = Served(folder, "serve", *APIS, *flags, "--file-storage-path", str(folder / "files"))
    try:
        yield running.wait()
    finally:
        running.close()


@pytest.mark.full
def test_the_gateway_relays_it(fleet: Served) -> None:
    """Whole, streamed, views and errors are as one server has them; no line of a journal reaches a client."""
    with ollama.Client(host=fleet.base, headers={"authorization": f"Bearer {KEY}"}) as client:
        given: Any = {"think": False, "options": COLD}
        whole = client.chat(MODEL, FRANCE, **given)
        assert "Paris" in (whole.message.content or "")
        raw = fleet.post("/api/chat", {"model": MODEL, "messages": FRANCE, **given}, stream=True)
        assert raw.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in raw.content.splitlines()]
        assert [line.keys() >= {"model", "created_at", "message", "done"} for line in lines] == [True] * len(lines)
        assert "".join(line["message"]["content"] for line in lines) == whole.message.content
        assert client.generate(MODEL, "The capital of France is", raw=True, options=COLD).response
        assert [model.model for model in client.list().models] == [MODEL]
        assert client.show(MODEL).capabilities == ["completion", "tools", "thinking"]
        with pytest.raises(ollama.ResponseError, match=r"options\.top_k: expected"):
            client.chat(MODEL, FRANCE, options={"top_k": "a"})
        assert requests.get(fleet.base + "/api/tags", timeout=60).json().keys() == {"error"}
        assert sum(fleet.count("dovetail_requests_total").values()) >= 3
