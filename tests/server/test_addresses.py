"""Addresses that people try mean a route, and no spelling of a route passes what stands before it."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from harness import Harness
from hypothesis import given
from hypothesis import strategies as st
from spelled import ask, spellings, websocket

from dovetail_server.apis.routes import BUILT_IN
from dovetail_server.http.addresses import Routes
from dovetail_server.ray.call import ProxiedRequest, ResponseHead
from dovetail_server.ray.proxy import DeployedModel, FrontState, create_app
from dovetail_server.routes import admin, profile
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start.app import routers

USER, ADMIN = "a-key-of-a-user", "the-key-of-the-admin"
ALL = Routes(
    [route.path for router in routers(ServeSettings(), BUILT_IN) for route in router.routes] + ["/openapi.json"]
)
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/models/tiny", "/v1/models/tiny"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/v1/models", "/v1/models"),
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat//completions", "/v1/chat/completions"),
        ("///models/", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/files/file-1/content", "/v1/files/file-1/content"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/models", "/v1/models"),
        ("/openai/responses", "/v1/responses"),
    ],
)
def test_an_address_means_a_route(address: str, meant: str) -> None:
    """A base address with `/v1` too many or too few, a doubled slash, one at the end, Azure's."""
    assert ALL.meant_by(address) == (meant, None)


@pytest.mark.parametrize(
    "address",
    [
        "/v1", "/v1/", "/openai/", "/openai/deployments/tiny/", "/V1/models", "/api/v1/models", "/v1/x/models",
        "/v1/../flush_cache", "/../v1/models", "/v1/./models", "/v1/%2e%2e/flush_cache", "/v1;/models", "\\v1\\models",
        "/openai/flush_cache", "/openai/v1/flush_cache", "/openai/deployments/tiny/flush_cache", "/v2/models",
        "/openai/deployments/tiny/files", "/v1x/models", "/deployments/tiny/chat/completions", "", "models", "//",
        "/x/acme//flush_cache", "/v1/x/acme/flush_cache", "/v1/flush_cache", "//flush_cache", "/flush_cache/",
        "//livez", "/v1/generate", "/v1/metrics", "//metrics", "/v1/health", "//docs", "/openai/v1/metrics",
        "//openapi.json",
    ],
)  # fmt: skip
def test_what_means_no_route_stays_as_it_is(address: str) -> None:
    """Dots are names, what is still encoded stays so, and routes that are not below `/v1` have one address."""
    assert ALL.meant_by(address) == (address, None)


PIECES = ["/", "//", "v1", "/v1", "..", ".", "openai", "deployments", "tiny", "%2e", "%2F", "\n", "é", "\x00"]
PIECES += [
    part
    for path in ("models", "chat", "completions", "flush_cache", "files", "docs", "x")
    for part in (path, f"/{path}")
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_only_what_stands_in_front_differs(path: str) -> None:
    """A route that is meant is one, means itself, and ends in the same parts; all others stay as they are."""
    meant, deployment = ALL.meant_by(path)
    assert ALL.meant_by(meant) == (meant, None)
    if meant == path:
        return
    assert meant in ALL
    parts, given = [part for part in meant.split("/") if part], [part for part in path.split("/") if part]
    own = parts[1:] if parts[:1] == ["v1"] else parts
    assert given[len(given) - len(own) :] == own
    front = given[: len(given) - len(own)]
    known = ["openai", "deployments", deployment] if deployment is not None else ["openai"]
    assert [part for part in front if part != "v1"] in ([], known)


def test_a_long_path_costs_what_its_length_does() -> None:
    """Sixty-four kilobytes of any piece, which is the most that a connection takes, are read in a moment."""
    for piece in ("/v1", "/", "/openai", "/openai/deployments/x", "/models", "/v1/models/", "//a"):
        began = time.thread_time()
        ALL.meant_by(piece * (65536 // len(piece)))
        assert time.thread_time() - began < 0.1, piece


def admin_routes() -> list[tuple[str, str]]:
    """Method and path of each route that needs the admin's key."""
    routes = [*admin.router.routes, *profile.router.routes]
    return [(next(iter(route.methods)), route.path) for route in routes]  # type: ignore[attr-defined]


def test_every_spelling_of_an_admin_route_needs_the_admins_key(make_harness: Any) -> None:
    """Without a key, with a user's, as a browser's password: never served, and the engine hears of nothing."""
    harness: Harness = make_harness(api_key=[USER], admin_api_key=ADMIN, disable_playground=False, open_metrics=True)
    asked: list[str] = []
    control = harness.engine.control

    async def noted(op: str, *args: Any, **more: Any) -> dict[str, Any]:
        asked.append(op)
        found: dict[str, Any] = await control(op, *args, **more)
        return found

    harness.engine.control = noted  # type: ignore[method-assign]
    routes = admin_routes()
    assert {"/flush_cache", "/abort_request", "/start_profile", "/stop_profile"} <= {path for _, path in routes}
    for method, path in routes:
        for spelled in spellings(path):
            for verb in {method, "GET", "HEAD"}:
                body = {"abort_all": True} if verb == "POST" else None
                for headers in (
                    {},
                    {"authorization": f"Bearer {USER}"},
                    {"authorization": "Basic eDph"},
                    {"api-key": USER},
                ):
                    status, _, _ = ask(harness.port, verb, spelled, body, **headers)
                    assert status in (307, 400, 401, 403, 404, 405), (verb, spelled, headers, status)
    assert asked == []
    for spelled in spellings("/flush_cache"):
        status, _, _ = ask(harness.port, "POST", spelled, authorization=f"Bearer {ADMIN}")
        decoded = unquote(spelled.removeprefix("http://localhost").partition("?")[0])
        assert status != 200 or decoded == "/flush_cache", spelled
    assert len(asked) >= 3, "as it is, with a query, and with its letters encoded"


def test_every_spelling_needs_a_key_where_the_route_does(make_harness: Any) -> None:
    """No way to write a path makes it one that is open."""
    harness: Harness = make_harness(api_key=[USER])
    for path in ("/v1/models", "/v1/chat/completions", "/get_model_info", "/metrics", "/v1/files", "/props", "/info"):
        for spelled in spellings(path):
            status, _, body = ask(harness.port, "GET", spelled)
            assert status in (400, 401, 404), (spelled, status, body)


def test_addresses_are_served(harness: Harness) -> None:
    """Each kind of them, with a body, an answer, and limits as at the route itself."""
    for path in (
        "/chat/completions",
        "/v1/v1/chat/completions",
        "//v1//chat/completions",
        "/openai/v1/chat/completions",
    ):
        status, _, body = ask(harness.port, "POST", path, ASK)
        assert (status, json.loads(body)["object"]) == (200, "chat.completion"), path
    assert json.loads(ask(harness.port, "GET", "/models")[2])["data"][0]["id"] == "tiny"
    assert json.loads(ask(harness.port, "GET", "/models/tiny-too")[2])["id"] == "tiny-too"
    status, _, body = ask(harness.port, "GET", "/embeddings")
    assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")
    status, _, body = ask(harness.port, "POST", "/messages", {"messages": 1})
    assert (status, json.loads(body)["type"]) == (400, "error"), "Anthropic's words at Anthropic's route"
    large = {"messages": [{"role": "user", "content": "x" * harness.settings.max_body_bytes}]}
    assert ask(harness.port, "POST", "//chat/completions", large)[0] == 413


def test_below_a_proxys_prefix(make_harness: Any) -> None:
    """The prefix goes first, whether or not the proxy takes it off; Anthropic's words are those of its route there."""
    harness: Harness = make_harness(root_path="/llm")
    began = time.process_time()  # the server is in this process
    assert ask(harness.port, "GET", "/llm" * 15_000 + "/v1/models")[0] == 200
    assert time.process_time() - began < 1
    for path in ("/llm/v1/models", "/v1/models", "/llm/models", "/llm//v1/models", "/llm/llm/v1/v1/models"):
        assert ask(harness.port, "GET", path)[0] == 200, path
    for path in ("/llmv1/models", "/v1/llm/models"):
        assert ask(harness.port, "GET", path)[0] == 404, path
    assert json.loads(ask(harness.port, "POST", "/llm/v1/messages", {})[2])["type"] == "error"


def test_a_proxys_prefix_may_be_that_of_the_routes(make_harness: Any) -> None:
    """`--root-path /v1`: the router must not take it off once more; what is not below it is where it was."""
    harness: Harness = make_harness(root_path="/v1", api_key=[USER])
    for path in ("/v1/models", "/v1/v1/models", "/models", "/v1/get_model_info", "/v1/livez", "/v1/models/tiny"):
        assert ask(harness.port, "GET", path, api_key=USER)[0] == 200, path
        assert ask(harness.port, "GET", path)[0] == (200 if path == "/v1/livez" else 401), path


def test_azures_clients(make_harness: Any) -> None:
    """The newest `openai`, in both forms: the deployment is a served name, the key comes in `api-key`."""
    import openai

    harness: Harness = make_harness(api_key=[USER])
    with openai.AzureOpenAI(azure_endpoint=harness.base, api_key=USER, api_version="2024-10-21") as client:
        asked = client.chat.completions.create(model="tiny-too", messages=ASK["messages"], max_tokens=4)
        assert asked.choices[0].message.content
        assert asked.model == "tiny-too"
        chunks = client.chat.completions.create(model="tiny", messages=ASK["messages"], stream=True)
        assert [chunk.model for chunk in chunks][-1] == "tiny"
        assert client.completions.create(model="tiny", prompt="hi").choices[0].text
        assert client.models.list().data[0].id == "tiny"
        assert client.chat.completions.create(model="gpt-4o", messages=ASK["messages"]).model == "tiny"
        with pytest.raises(openai.NotFoundError, match="'other' does not exist here; served: tiny, tiny-too"):
            client.chat.completions.create(model="other", messages=ASK["messages"])
    with openai.OpenAI(base_url=f"{harness.base}/openai/v1/", api_key=USER) as client:
        assert client.responses.create(model="tiny", input="hi").output_text
    stranger = openai.AzureOpenAI(azure_endpoint=harness.base, api_key="wrong", api_version="2024-10-21")
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    path = "/openai/deployments/{}/chat/completions?api-version=2024-10-21"
    for name, status in (("tiny", 200), ("none", 404), ("t%2Finy", 404), ("%2e%2e", 404), ("x" * 4000, 404)):
        found, _, body = ask(harness.port, "POST", path.format(name), ASK, api_key=USER)
        assert (found, len(body) < 2000) == (status, True), name
    both = {"api-key": USER, "authorization": "Bearer other"}
    assert ask(harness.port, "GET", "/v1/models", **both)[0] == 401


def test_head_answers_where_get_does(harness: Harness) -> None:
    """With its status and headers, without a body; where only POST is served it is refused as such."""
    for path in ("/v1/models", "/models", "/livez", "/v1/models/tiny", "/openapi.json", "/metrics", "/", "/health"):
        got, headers, body = ask(harness.port, "GET", path)
        status, shown, nothing = ask(harness.port, "HEAD", path)
        assert (status, nothing) == (got, b""), path
        assert shown.get("content-type") == headers.get("content-type")
        if path in ("/v1/models", "/models"):
            assert int(shown["content-length"]) == len(body)
    assert ask(harness.port, "HEAD", "/v1/embeddings")[0] == 405
    assert ask(harness.port, "HEAD", "/nothing")[0] == 404
    assert ask(harness.port, "HEAD", "/v1/models/none")[0] == 404


def test_head_keeps_a_connection_in_step(harness: Harness) -> None:
    """A body behind a HEAD would be read as the next reply."""
    connection = http.client.HTTPConnection("127.0.0.1", harness.port, timeout=60)
    for method in ("HEAD", "GET", "HEAD", "GET"):
        connection.request(method, "/v1/models")
        reply = connection.getresponse()
        assert (reply.status, bool(reply.read())) == (200, method == "GET")
    connection.close()


def test_facts_for_clients_of_other_servers(make_harness: Any) -> None:
    """llama.cpp's and Text Generation Inference's: what a client sizes its prompts by; no folder for users."""
    harness: Harness = make_harness(api_key=[USER], admin_api_key=ADMIN)
    context = harness.state.text.limits.context_len
    props = json.loads(ask(harness.port, "GET", "/props", authorization=f"Bearer {USER}")[2])
    assert props["default_generation_settings"]["n_ctx"] == context
    assert (props["model_alias"], props["total_slots"]) == ("tiny", harness.state.info.max_running_requests)
    assert "/" not in props["model_path"]
    assert props["chat_template"] == harness.tools.template.source
    assert json.loads(ask(harness.port, "GET", "/props", authorization=f"Bearer {ADMIN}")[2])["model_path"].startswith(
        "/"
    )
    info = json.loads(ask(harness.port, "GET", "/info", authorization=f"Bearer {USER}")[2])
    assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == ("tiny", context, context - 1)


@pytest.mark.parametrize("keys", [{}, {"api_key": [USER]}])
def test_a_preflight_names_the_flag(keys: dict[str, Any], make_harness: Any) -> None:
    """It comes without a key, so the key is not what it is told of; with the flag, others' pages are told the same."""
    question = {"origin": "https://app.example", "access-control-request-method": "POST"}
    for settings in ({}, {"allow_origins": ["https://other.example"]}):
        harness: Harness = make_harness(**keys, **settings)
        for path in ("/v1/chat/completions", "/chat/completions", "/nothing"):
            status, headers, body = ask(harness.port, "OPTIONS", path, **question)
            assert (status, json.loads(body)["error"]["code"]) == (403, "origin_not_allowed")
            assert "--allow-origins" in json.loads(body)["error"]["message"]
            assert "access-control-allow-origin" not in headers
    harness = make_harness(**keys, allow_origins=["https://app.example"])
    status, headers, _ = ask(harness.port, "OPTIONS", "/chat/completions", **question)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert ask(make_harness(**keys).port, "OPTIONS", "/v1/models", origin="https://app.example")[0] in (401, 405)


def test_websockets_are_refused_in_words(make_harness: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Each with its reason: the key, the name, the page, or that nothing is there; no bare 403, no error in the log."""
    harness: Harness = make_harness(api_key=[USER], allowed_hosts=["llm.example"])
    key = {"authorization": f"Bearer {USER}"}
    for path in ("/v1/embeddings", "/nothing", "//v1/models"):
        status, error = websocket(harness.port, path, **key)
        assert (status, error["code"]) == (404, "websocket_not_served")
        assert "stream: true" in error["message"]
    status, error = websocket(harness.port, "/v1/realtime", **key)
    assert "text only" in error["message"]
    assert websocket(harness.port, "/v1/responses")[1]["code"] == "invalid_api_key"
    assert websocket(harness.port, "/v1/responses", authorization="Bearer no")[0] == 401
    foreign = {**key, "Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    status, error = websocket(harness.port, "/v1/responses", **foreign)
    assert (status, error["code"]) == (403, "origin_not_allowed")
    harness.close()
    assert "ERROR" not in capfd.readouterr().err


def test_a_server_without_a_library_for_websockets_says_the_same(harness: Harness) -> None:
    """It sees a GET with the headers of the handshake."""
    handshake = {"sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version": "13"}
    for path in ("/v1/embeddings", "/nothing", "/v1/responses"):
        status, _, body = ask(harness.port, "GET", path, **handshake)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (404, "websocket_not_served")
        assert ("dovetail-llm[websocket]" in error["message"]) is (path == "/v1/responses")


class Reply:
    """A replica's reply, as `Pieces` reads and closes it."""

    def __init__(self) -> None:
        self._pieces = iter((ResponseHead(200, [(b"content-type", b"application/json")]), b"{}"))

    async def __anext__(self) -> Any:
        try:
            return next(self._pieces)
        except StopIteration:
            raise StopAsyncIteration from None

    def cancel(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore")  # Ray's own, at its first import
@pytest.mark.parametrize(
    ("method", "path", "meant", "model"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions", "one"),
        ("POST", "//v1/v1/completions", "/v1/completions", "one"),
        ("POST", "/openai/deployments/two/chat/completions", "/v1/chat/completions", "two"),
        ("POST", "/openai/deployments/none/chat/completions", None, None),
        ("POST", "/v1/flush_cache", "/v1/flush_cache", "one"),  # where it is a 404
        ("GET", "/metrics", None, None),
    ],
)
def test_rays_front_reads_addresses_alike(
    method: str, path: str, meant: str | None, model: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before keys, the choice of the model, and what is served under Ray at all."""
    state = FrontState(
        ServeSettings(api_key=[USER]), [DeployedModel("d1", ["one"]), DeployedModel("d2", ["two"])], "key"
    )
    asked: list[tuple[str, str]] = []

    def remote(served: DeployedModel, call: ProxiedRequest) -> Reply:
        asked.append((served.names[0], call.path))
        return Reply()

    def handle(served: DeployedModel) -> Any:
        return SimpleNamespace(remote=lambda *prompted, call=None: remote(served, call or prompted[0]))

    monkeypatch.setattr(state, "handle", handle)
    body = b"" if method == "GET" else json.dumps({"model": "one", **ASK}).encode()

    async def call(*headers: tuple[bytes, bytes]) -> int:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        own = [(b"host", b"localhost"), (b"content-type", b"application/json"), *headers]
        scope = {"type": "http", "method": method, "path": path, "headers": own, "query_string": b"", "client": None}
        await create_app(state)({**scope, "http_version": "1.1", "root_path": "", "state": {}}, receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(call()) == 401
    assert asyncio.run(call((b"api-key", USER.encode()))) == (404 if meant is None else 200)
    assert asked == ([] if meant is None else [(model, meant)])
