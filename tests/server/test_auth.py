"""Keys: nothing passes without one, no trick gets round them, and what one key owns no other sees."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from exchanges import error_of
from harness import Harness
from pydantic import SecretStr

from dovetail.contracts.errors import ConfigError
from dovetail.utils import wait_for_server
from dovetail_server.cli.options import load_settings, parse_flags
from dovetail_server.http.auth import PROBES, Auth, Keys, owner_name, presented_key
from dovetail_server.serving.hooks import AdminEndpoint, ApiHooks, AsgiEndpoint
from dovetail_server.start.run import announce, forget_secrets
from dovetail_server.start.startup import StartupTimer

ALICE, BOB, ADMIN = "sk-alice-1f6c", "sk-bob-77aa", "sk-admin-e01d"
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def as_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def plugin_route(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["state"]["owner"].encode()})


@pytest.fixture(scope="module")
def keyed(folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A server with two keys and an admin's."""
    hooks = ApiHooks()
    hooks.add_route("/x/acme/free", AsgiEndpoint(plugin_route), "acme")
    hooks.add_route("/x/acme/reset", AdminEndpoint(plugin_route), "acme")
    running = Harness(
        folder,
        hooks=hooks,
        api_key=[ALICE, BOB],
        admin_api_key=ADMIN,
        file_storage_path=tmp_path_factory.mktemp("keyed"),
    )
    yield running
    running.close()


def raw(harness: Harness, request: bytes) -> tuple[int, bytes]:
    """Send bytes as they are; return the status and the rest of the reply."""
    with socket.create_connection(("127.0.0.1", harness.port), timeout=60) as client:
        client.sendall(request)
        received = b""
        while b"\r\n\r\n" not in received and (data := client.recv(1 << 16)):
            received += data
        client.settimeout(0.05)
        try:
            while data := client.recv(1 << 16):
                received += data
        except TimeoutError:
            pass
    match = re.match(rb"HTTP/1.1 (\d+)", received)
    return (int(match.group(1)) if match else 0), received


def test_every_route_needs_a_key(keyed: Harness) -> None:
    """Whatever is routed, by whatever method, and what is not: 401 in OpenAI's form, with a request id."""
    app: Any = keyed.server.config.app
    routes = [inner for outer in app.routes for inner in getattr(outer, "original_router", app).routes]
    found = {re.sub(r"\{[^}]*\}", "x", route.path) for route in routes if hasattr(route, "path")}
    documented = keyed.get("/openapi.json", headers=as_key(ALICE)).json()["paths"]
    paths = {*found, *documented, "/nothing", "/", "/metrics"}
    assert {"/docs", "/flush_cache", "/v1/files/x", "/x/acme/free", "/generate"} <= found
    for path in sorted(paths - {"/livez", "/", "/playground", *PROBES}):
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"):
            reply = keyed.http.request(method, keyed.base + path, timeout=60)
            assert reply.status_code == 401, (method, path)
            if path.startswith("/v1/messages") and method != "HEAD":  # errors in Anthropic's form
                assert reply.json()["error"]["type"] == "authentication_error"
            elif method != "HEAD":
                error = error_of(reply)
                assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
            assert "www-authenticate" in reply.headers
            assert reply.headers["x-request-id"]
    assert keyed.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [b"authorization: Bearer %s" % ALICE.encode()],
        [b"AUTHORIZATION:   bearer    %s  " % ALICE.encode()],
        [b"Authorization: BEARER %s" % BOB.encode()],
        [b"x-api-key: %s" % BOB.encode()],
        [b"X-Api-Key: %s" % ADMIN.encode()],
        [b"x-api-key: %s" % BOB.encode(), b"authorization: Bearer %s" % BOB.encode()],
    ],
)
def test_a_key_opens(keyed: Harness, headers: list[bytes]) -> None:
    """Both headers carry keys, in any case of the scheme and with any spaces around."""
    head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
    status, _ = raw(keyed, head + b"".join(h + b"\r\n" for h in headers) + b"\r\n")
    assert status == 200


GOOD = b"authorization: Bearer " + ALICE.encode()


@pytest.mark.parametrize(
    "headers",
    [
        [b"authorization: Bearer "],
        [b"authorization: Bearer"],
        [b"authorization: " + ALICE.encode()],
        [b"authorization: Bearer " + ALICE.encode()[:-1]],
        [b"authorization: Bearer " + ALICE.encode() + b"x"],
        [b"authorization: Bearer " + ALICE.upper().encode()],
        [b"authorization: Bearer " + ALICE.encode() + b"," + BOB.encode()],
        [b"authorization: Bearer Bearer " + ALICE.encode()],
        [b"authorization: Bearer\t" + ALICE.encode()],
        [b"authorization: Basic " + base64.b64encode(b"x:" + ALICE.encode())],
        [b"authorization: Digest " + ALICE.encode()],
        [b"authorization: Bearer \xc3\xa9"],
        [b"authorization: Bearer \xff\xfe"],
        [b"authorization: Bearer " + b"x" * 30_000],
        [b"authorization: Bearer **********"],
        [b"authorization: Bearer None"],
        [b"x-api-key:"],
        [b"x-api-key: Bearer " + ALICE.encode()],
        [GOOD, b"authorization: Bearer wrong"],
        [b"authorization: Bearer wrong", GOOD],
        [GOOD, b"x-api-key: wrong"],
        [GOOD, b"authorization: Bearer " + BOB.encode()],
        [b"authorization_: Bearer " + ALICE.encode()],
        [b"x-forwarded-authorization: Bearer " + ALICE.encode()],
        [b"x-forwarded-for: 127.0.0.1", b"x-original-url: /livez", b"x-rewrite-url: /livez"],
        [b"cookie: api_key=" + ALICE.encode()],
    ],
)
def test_no_header_trick_opens(keyed: Harness, headers: list[bytes]) -> None:
    """Anything but one right key is a 401."""
    status, reply = raw(
        keyed, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + b"".join(h + b"\r\n" for h in headers) + b"\r\n"
    )
    assert status == 401
    assert ALICE.encode() not in reply


@pytest.mark.parametrize(
    "header", [GOOD + b"\0", b"authorization: Bearer \0" + ALICE.encode(), b"authorization : x", b"author\0: x", b": x"]
)
def test_malformed_headers_do_not_get_in(keyed: Harness, header: bytes) -> None:
    """What is no HTTP is refused before anything looks at it."""
    status, _ = raw(keyed, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + header + b"\r\n\r\n")
    assert status in (400, 401)


@pytest.mark.parametrize(
    "path",
    [
        "/livez/", "/livez/../v1/models", "/livez/..%2fv1/models", "/livez%2f..%2fv1%2fmodels", "//livez",
        "//v1/models", "/./livez", "/livez;/v1/models", "/livez%00", "/LIVEZ", "/v1//models", "/v1/models/",
        "/%76%31/models", "/v1/models#/livez", "/v1/models?/livez", "/docs/../v1/models", "/docs//",
        "/docs/..%2fopenapi.json", "/openapi.json/", "http://x/v1/models", "/\\livez", "*",
        "/%2e%2e/v1/models", "/livez%20", "/livez\t",
    ],
)  # fmt: skip
def test_no_path_trick_opens(keyed: Harness, path: str) -> None:
    """Only the very path /livez is open, however another is written."""
    status, reply = raw(keyed, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    assert status in (400, 401), reply
    assert raw(keyed, b"GET /livez?x=1 HTTP/1.1\r\nhost: localhost\r\n\r\n")[0] == 200
    assert raw(keyed, b"GET /%6civez HTTP/1.1\r\nhost: localhost\r\n\r\n")[0] == 200


def test_a_body_is_not_read_before_the_key(keyed: Harness) -> None:
    """A refusal does not wait for the body, nor does it parse it."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\ncontent-length: 900000\r\n"
    )
    assert raw(keyed, head + b"\r\n{")[0] == 401


def test_documentation_takes_the_key_as_a_password(keyed: Harness) -> None:
    """A browser can open the documentation, and only that."""
    basic = {"authorization": "Basic " + base64.b64encode(f"me:{ALICE}".encode()).decode()}
    reply = keyed.get("/openapi.json")
    assert reply.headers["www-authenticate"].startswith("Basic ")
    assert keyed.get("/openapi.json", headers=basic).status_code == 200
    assert keyed.get("/v1/models", headers=basic).status_code == 401
    assert keyed.post("/openapi.json", headers=basic).status_code == 401
    wrong = {"authorization": "Basic " + base64.b64encode(b"me:wrong").decode()}
    assert keyed.get("/openapi.json", headers=wrong).status_code == 401
    assert keyed.get("/openapi.json", headers={"authorization": "Basic %%%"}).status_code == 401


def test_admin_routes_need_the_admins_key(keyed: Harness) -> None:
    """A user gets 403 there, the admin gets in there and everywhere else; a plugin's routes may ask for it too."""
    for path in ("/flush_cache", "/abort_request", "/start_profile", "/stop_profile"):
        reply = keyed.post(path, {"rid": "none"}, headers=as_key(ALICE))
        assert (
            (reply.status_code, error_of(reply)["code"]) == (403, "admin_key_required") if "x" not in path[:3] else True
        )
        assert reply.status_code in (403, 405)
    assert keyed.get("/flush_cache", headers=as_key(BOB)).status_code == 403
    assert keyed.get("/x/acme/reset", headers=as_key(BOB)).status_code == 403
    for path in ("/flush_cache", "/v1/models", "/x/acme/reset", "/x/acme/free"):
        assert keyed.get(path, headers=as_key(ADMIN)).status_code == 200
    assert keyed.get("/x/acme/free", headers=as_key(BOB)).text == owner_name(BOB)


def test_admin_key_alone_leaves_the_rest_open(make_harness: Callable[..., Harness]) -> None:
    """Without --api-key everybody may generate, and only the admin may touch other people's requests."""
    harness = make_harness(admin_api_key=ADMIN)
    assert harness.post(CHAT, BODY).status_code == 200
    assert harness.post(CHAT, BODY, headers=as_key("EMPTY")).status_code == 200
    reply = harness.get("/flush_cache")
    assert (reply.status_code, error_of(reply)["code"]) == (401, "invalid_api_key")
    assert harness.get("/flush_cache", headers=as_key("EMPTY")).status_code == 401
    assert harness.get("/flush_cache", headers=as_key(ADMIN)).status_code == 200


def test_an_open_server_ignores_keys(harness: Harness) -> None:
    """Clients that always send a key are served where none is needed."""
    assert harness.post(CHAT, BODY, headers=as_key("EMPTY")).status_code == 200
    assert harness.get("/flush_cache", headers=as_key("EMPTY")).status_code == 200


def test_a_key_aborts_its_own_requests_only(make_harness: Callable[..., Harness]) -> None:
    """Without an admin's key, /abort_request reaches what the caller itself has sent, `abort_all` too."""
    harness = make_harness(api_key=[ALICE, BOB])
    harness.engine.hold.clear()
    body = json.dumps({"text": "abc", "rid": "of-alice"}).encode()
    head = (
        b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        % len(body)
    )
    with socket.create_connection(("127.0.0.1", harness.port)) as client:
        client.sendall(head + GOOD + b"\r\n\r\n" + body)
        harness.eventually(lambda: (owner_name(ALICE), "of-alice") in harness.state.live)
        for asked in ({"rid": "of-alice"}, {"abort_all": True}):
            assert harness.post("/abort_request", asked, headers=as_key(BOB)).json() == {"aborted": 0}
        assert harness.state.num_live == 1
        assert harness.post("/abort_request", {"abort_all": True}, headers=as_key(ALICE)).json() == {"aborted": 1}
        harness.eventually(lambda: harness.state.num_live == 0)


def upload(harness: Harness, key: str, content: bytes) -> str:
    files = {"file": ("in.jsonl", content)}
    reply = harness.post("/v1/files", files=files, data={"purpose": "batch"}, headers=as_key(key))
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def wait_for(harness: Harness, batch_id: str, key: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def is_over() -> bool:
        found.update(harness.get(f"/v1/batches/{batch_id}", headers=as_key(key)).json())
        return found["status"] in ("completed", "failed", "cancelled")

    harness.eventually(is_over)
    return found


def test_files_and_batches_belong_to_their_key(keyed: Harness) -> None:
    """Another key, the admin's too, sees nothing of them: 404 for each route, and lists without them."""
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": BODY}
    file_id = upload(keyed, ALICE, json.dumps(line).encode() + b"\n")
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch_id = keyed.post("/v1/batches", asked, headers=as_key(ALICE)).json()["id"]
    done = wait_for(keyed, batch_id, ALICE)
    assert done["status"] == "completed", done
    routes = [
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("GET", f"/v1/files/{done['output_file_id']}/content"),
        ("DELETE", f"/v1/files/{file_id}"),
        ("GET", f"/v1/batches/{batch_id}"),
        ("POST", f"/v1/batches/{batch_id}/cancel"),
    ]
    response = keyed.post(
        "/v1/responses", {"model": "tiny", "input": "hi", "store": True}, headers=as_key(ALICE)
    ).json()
    routes += [(method, f"/v1/responses/{response['id']}") for method in ("GET", "DELETE")]
    routes += [
        ("POST", f"/v1/responses/{response['id']}/cancel"),
        ("GET", f"/v1/responses/{response['id']}/input_items"),
    ]
    assert keyed.get(f"/v1/responses/{response['id']}", headers=as_key(ALICE)).status_code == 200
    for key in (BOB, ADMIN):
        for method, path in routes:
            reply = keyed.http.request(method, keyed.base + path, headers=as_key(key), timeout=60)
            assert reply.status_code == 404, (method, path, reply.text)
        for path in ("/v1/files", "/v1/batches"):
            assert keyed.get(path, headers=as_key(key)).json()["data"] == []
        foreign = keyed.post("/v1/batches", asked, headers=as_key(key)).json()
        assert foreign["object"] == "batch"
        failed = wait_for(keyed, foreign["id"], key)
        missing = {**asked, "input_file_id": "file-missing"}
        other = wait_for(keyed, keyed.post("/v1/batches", missing, headers=as_key(key)).json()["id"], key)
        assert failed["status"] == other["status"] == "failed"
        code = failed["errors"]["data"][0]["code"]
        assert code == other["errors"]["data"][0]["code"], "a file of somebody else looks as one that is not there"
        keyed.post(f"/v1/batches/{foreign['id']}/cancel", headers=as_key(key))
    assert len(keyed.get("/v1/files", headers=as_key(ALICE)).json()["data"]) == 2
    assert keyed.get(f"/v1/files/{file_id}/content", headers=as_key(ALICE)).status_code == 200


def test_lines_of_a_batch_run_as_their_owner(folder: Any, tmp_path: Any, make_harness: Callable[..., Harness]) -> None:
    """Whoever opened the storage first, each line is a request of the key whose batch it is."""
    harness = make_harness(api_key=[ALICE, BOB], file_storage_path=tmp_path)
    upload(harness, BOB, b"{}\n")
    harness.engine.hold.clear()
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {**BODY, "rid": "line-a"}}
    asked = {"input_file_id": upload(harness, ALICE, json.dumps(line).encode() + b"\n"), "endpoint": CHAT}
    batch_id = harness.post("/v1/batches", {**asked, "completion_window": "24h"}, headers=as_key(ALICE)).json()["id"]
    harness.eventually(lambda: (owner_name(ALICE), "line-a") in harness.state.live)
    assert harness.post("/abort_request", {"abort_all": True}, headers=as_key(BOB)).json() == {"aborted": 0}
    harness.engine.hold.set()
    assert wait_for(harness, batch_id, ALICE)["request_counts"]["completed"] == 1


def test_keys_are_in_no_output(
    make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither server info, documents, logs, errors, help nor a settings object's text holds a key."""
    logging.getLogger("dovetail").propagate = True
    with caplog.at_level(logging.DEBUG):
        harness = make_harness(api_key=[ALICE], admin_api_key=ADMIN, log_requests=True)
        shown = [repr(harness.settings), str(harness.settings), harness.settings.model_dump_json()]
        for path in ("/get_server_info", "/server_info", "/model_info", "/openapi.json", "/v1/plugins", "/metrics"):
            shown.append(harness.get(path, headers=as_key(ADMIN)).text)
        shown.append(harness.post(CHAT, BODY, headers=as_key(ALICE)).text)
        shown.append(harness.post(CHAT, {**BODY, "model": "x"}, headers=as_key(ALICE)).text)
        shown.append(harness.get("/v1/models", headers=as_key(ALICE + ALICE)).text)
    shown += [caplog.text, *capsys.readouterr()]
    assert "1 prompt tokens" in caplog.text or "prompt tokens" in caplog.text
    assert not [text for text in shown if ALICE in text or ADMIN in text]


@pytest.mark.parametrize(
    "argv",
    [
        ["--api-key", "sec ret"],
        ["--api-key", "sécret"],
        ["--admin-api-key", "sec ret"],
        ["--api-key", "secret", "--admin-api-key", "secret"],
        ["--api-key", "secret", "--port", "x"],
    ],
)
def test_a_mistake_does_not_show_the_key(argv: list[str]) -> None:
    """The error of a bad key, or beside one, names the flag and not the value."""
    with pytest.raises(ConfigError) as caught:
        load_settings(parse_flags(argv))  # type: ignore[arg-type]
    assert "--" in str(caught.value)
    assert not re.search(r"sec ?ret|sécret", str(caught.value))


def test_keys_come_from_flags_environment_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Several keys may be given anywhere; help and defaults show none of them."""

    def keys(*argv: str) -> list[str]:
        flags = parse_flags(argv)
        assert isinstance(flags, dict)
        return [key.get_secret_value() for key in load_settings(flags).api_key]

    assert keys() == []
    assert keys("--api-key", "a,b", "model", "--api-key", "c") == ["a", "b", "c"]
    monkeypatch.setenv("DOVETAIL_API_KEY", "e1, e2")
    assert keys() == ["e1", "e2"]
    for argv in (["--help"], ["--help=all"]):
        text = parse_flags(argv)
        assert isinstance(text, str)
        assert "--api-key KEY" in text
        assert "e1" not in text
    monkeypatch.delenv("DOVETAIL_API_KEY")
    config = tmp_path / "c.yaml"
    config.write_text("api-key: [f1, f2]\nadmin_api_key: f3\n")
    assert keys("--config", str(config)) == ["f1", "f2"]
    config.write_text("api_key: f1\n")
    assert keys("--config", str(config)) == ["f1"]


def test_a_public_address_without_a_key_is_warned_of(
    make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture
) -> None:
    """It is allowed, and hard to overlook; with a key, or on this machine only, there is no warning."""

    class Listener:
        def __init__(self, host: str) -> None:
            self.host = host

        def getsockname(self) -> tuple[str, int]:
            return self.host, 30000

    logging.getLogger("dovetail").propagate = True
    base = make_harness().settings
    for host, key, warns in (("0.0.0.0", [], True), ("0.0.0.0", [SecretStr(ALICE)], False), ("127.0.0.1", [], False)):
        caplog.clear()
        settings = base.model_copy(update={"api_key": key})
        announce(settings, Keys.of(settings), Listener(host), StartupTimer())  # type: ignore[arg-type]
        found = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert bool(found) is warns
        assert not warns or "WITHOUT A KEY" in caplog.text


def test_comparison_is_by_digest() -> None:
    """No plain key is kept, and the owner's name does not tell the key."""
    keys = Keys([SecretStr(ALICE)], SecretStr(ADMIN))
    assert ALICE not in repr(vars(keys))
    assert ALICE.encode() not in repr(vars(keys)).encode()
    assert keys.identify(ALICE.encode()) is not None
    assert keys.identify(b"x" * 10_000) is None
    assert ALICE not in owner_name(ALICE)
    assert len(owner_name(ALICE)) <= 64  # the column's width
    assert presented_key([(b"authorization", b"Bearer a"), (b"x-api-key", b"b")]) is None


def test_a_websocket_needs_a_key() -> None:
    """What is no plain HTTP request is closed without one, whatever a plugin may serve there."""
    sent: list[Any] = []
    reached: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    layer = Auth(app, Keys([SecretStr(ALICE)]))
    scope = {"type": "websocket", "path": "/x/acme/live", "headers": []}
    asyncio.run(layer(scope, receive, send))
    assert (sent[0]["type"], reached) == ("websocket.close", [])
    asyncio.run(layer({**scope, "headers": [(b"x-api-key", ALICE.encode())]}, receive, send))
    assert reached[0]["state"]["owner"] == owner_name(ALICE)
    foreign = [(b"x-api-key", ALICE.encode()), (b"sec-fetch-site", b"cross-site"), (b"origin", b"https://evil.example")]
    asyncio.run(layer({**scope, "headers": foreign}, receive, send))
    assert (len(sent), len(reached)) == (2, 1)


def test_other_processes_inherit_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the settings are read, secrets leave the environment, and the rest of it stays."""
    for name in ("API_KEY", "ADMIN_API_KEY", "DATABASE_URL", "PORT"):
        monkeypatch.setenv(f"DOVETAIL_{name}", "1")
    forget_secrets()
    assert [name for name in os.environ if name.startswith("DOVETAIL_")] == ["DOVETAIL_PORT"]


def preflight(harness: Harness, origin: str, path: str = CHAT) -> requests.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return harness.http.options(harness.base + path, headers=headers, timeout=60)


def test_cors_is_off_by_default(harness: Harness, keyed: Harness) -> None:
    """No reply tells a browser that another site may read it, and a preflight is refused with the flag's name."""
    reply = harness.post(CHAT, BODY, headers={"origin": "https://evil.example"})
    assert not [name for name in reply.headers if name.startswith("access-control")]
    for server in (harness, keyed):
        reply = preflight(server, "https://evil.example")
        assert (reply.status_code, "--allow-origins" in error_of(reply)["message"]) == (403, True)
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_cors_for_some_origins(make_harness: Callable[..., Harness]) -> None:
    """A preflight of an allowed origin is answered without a key; the request itself, and its errors, need one."""
    good, evil = "https://chat.example.org", "https://evil.example"
    harness = make_harness(api_key=[ALICE], allow_origins=[good], max_body_bytes=2000)
    reply = preflight(harness, good)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, good)
    assert "authorization" in reply.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-origin" not in preflight(harness, evil).headers
    assert preflight(harness, evil).status_code == 403
    plain = harness.http.options(harness.base + CHAT, headers={"origin": good}, timeout=60)
    assert plain.status_code == 401, "no preflight: it does not say what it wants to do"
    for headers, body, status in (
        (as_key(ALICE), BODY, 200),
        ({}, BODY, 401),
        (as_key(ALICE), {**BODY, "model": "x"}, 404),
        (as_key(ALICE), {**BODY, "user": "x" * 3000}, 413),
    ):
        reply = harness.post(CHAT, body, headers={**headers, "origin": good})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, good)
        assert "x-request-id" in reply.headers
        reply = harness.post(CHAT, body, headers={**headers, "origin": evil})
        assert reply.status_code == (status if status == 413 else 403 if headers else 401)
        assert "access-control-allow-origin" not in reply.headers


def test_pages_of_other_sites_change_nothing(make_harness: Callable[..., Harness], tmp_path: Any) -> None:
    """A form elsewhere cannot upload, nor an image flush the cache; links to /docs and allowed sites work."""
    good = "https://chat.example.org"
    harness = make_harness(allow_origins=[good], file_storage_path=tmp_path)
    for site in ("cross-site", "same-site"):
        for origin in ("https://evil.example", "null"):
            headers = {"sec-fetch-site": site, "origin": origin}
            form = {"files": {"file": ("a.txt", b"x")}, "data": {"purpose": "user_data"}}
            for path, body in (("/v1/files", form), ("/flush_cache", {}), (CHAT, {"json": BODY})):
                reply = harness.post(path, headers=headers, **body)
                assert (reply.status_code, error_of(reply)["code"]) == (403, "origin_not_allowed")
            assert harness.get("/flush_cache", headers=headers).status_code == 403
            assert harness.get("/docs", headers=headers).status_code == 200
        assert harness.get("/flush_cache", headers={"sec-fetch-site": site}).status_code == 403
        assert harness.post(CHAT, BODY, headers={"sec-fetch-site": site, "origin": good}).status_code == 200
    for site in ("none", "same-origin"):
        assert harness.post(CHAT, BODY, headers={"sec-fetch-site": site, "origin": "http://x"}).status_code == 200
    anybody = make_harness(allow_origins=["*"])
    headers = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}
    assert anybody.post(CHAT, BODY, headers=headers).status_code == 200


def test_a_script_waits_for_a_server_with_keys(keyed: Harness) -> None:
    """`wait_for_server` takes the key."""
    wait_for_server(keyed.base, timeout=60, api_key=ALICE)
    with pytest.raises(TimeoutError):
        wait_for_server(keyed.base, timeout=0.1)


def test_probes_need_no_key_and_tell_no_reasons(make_harness: Any) -> None:
    """A kubelet has no key: it learns the status alone, with a wrong key, too; with a right one the reason."""
    harness = make_harness(api_key=[ALICE], is_ready=False)
    for path in PROBES:
        for headers in ({}, as_key("wrong")):
            reply = harness.get(path, headers=headers)
            assert (reply.status_code, reply.json()) == (503, {"status": "unavailable"})
        assert harness.get(path, headers=as_key(ALICE)).json()["reason"] == "starting"
    assert harness.get("/metrics").status_code == 401
    assert harness.get("/openapi.json", headers=as_key(ALICE)).json()["paths"]["/health"]["get"]["security"] == []


def test_probes_and_metrics_have_their_own_switches(make_harness: Any) -> None:
    """`--closed-probes` asks for a key, `--open-metrics` does not."""
    harness = make_harness(api_key=[ALICE], closed_probes=True, open_metrics=True)
    assert {harness.get(path).status_code for path in PROBES} == {401}
    assert {harness.get(path, headers=as_key("wrong")).status_code for path in PROBES} == {401}
    assert harness.get("/livez").status_code == 200
    assert harness.get("/metrics").status_code == 200
    assert harness.get("/v1/models").status_code == 401


def test_the_address_leads_to_the_playground(make_harness: Any) -> None:
    """`/` sends a browser to /playground, under a proxy's path, too; /docs has a scheme to authorize by."""
    harness = make_harness(api_key=[ALICE], root_path="/llm")
    reply = harness.get("/", allow_redirects=False)
    assert (reply.status_code, reply.headers["location"]) == (307, "playground")
    schemes = harness.get("/openapi.json", headers=as_key(ALICE)).json()["components"]["securitySchemes"]
    assert set(schemes) == {"key", "x-api-key"}


def test_anthropics_clients_list_models_in_their_form(make_harness: Any) -> None:
    """The header that they send chooses the form."""
    import anthropic

    harness = make_harness()
    with anthropic.Anthropic(base_url=harness.base, api_key="none") as client:
        found = list(client.models.list())
        assert [model.id for model in found] == ["tiny", "tiny-too"]
        one = client.models.retrieve("tiny")
    assert (one.display_name, one.max_input_tokens) == ("tiny", harness.state.text.limits.context_len)
    assert found[0].created_at.year >= 2024
    assert harness.get("/v1/models").json()["object"] == "list"
