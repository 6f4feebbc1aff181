"""Golden exchanges: what every endpoint answers, word for word, over a server whose model says what it is told.

`WRITE_GOLDEN=1 pytest tests/server/test_exchanges.py` records what the server answers now; read the difference before
you commit it. Identifiers and times stand as `<file>` and 0.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
from exchanges import steady
from harness import Harness

GOLDEN = Path(__file__).parent / "golden"
TEXT = "Hi"
THINKS = "<think>\nhm\n</think>\n\nHi"
CALLS = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
USER = [{"role": "user", "content": "Hey"}]
FUNCTION = {"name": "f", "description": "F", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
FLAT_TOOL = {"type": "function", **FUNCTION}
CHAT = {"model": "tiny", "messages": USER}
STREAM = {**CHAT, "stream": True}
IMAGE = [{"role": "user", "content": [{"type": "input_image"}]}]
RESPONSE = {"model": "tiny", "input": "Hey"}
MESSAGE = {"model": "tiny", "max_tokens": 90, "messages": USER}
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object"}}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}


@dataclass
class Ask:
    """One exchange.

    `path` and `body` may hold `{name}` for an id that an earlier exchange was told to `save`; `only` are the keys that
    are compared where the others are this machine's; `until` repeats the request until its status is that.
    """

    name: str
    method: str
    path: str
    body: Any = None
    says: str = TEXT
    save: str = ""
    only: tuple[str, ...] = ()
    until: str = ""
    form: dict[str, str] = field(default_factory=dict)


def get(name: str, path: str, **options: Any) -> Ask:
    return Ask(name, "GET", path, **options)


CONVERSATIONS = "/v1/conversations"


def post(name: str, path: str, body: Any = None, **options: Any) -> Ask:
    return Ask(name, "POST", path, body, **options)


FAMILIES: dict[str, list[Ask]] = {
    "openai": [
        get("models", "/v1/models", only=("object",)),
        get("model", "/v1/models/tiny-too", only=("id", "object", "owned_by", "max_model_len")),
        get("no model", "/v1/models/x"),
        Ask("delete the model", "DELETE", "/v1/models/tiny"),
        Ask("delete no model", "DELETE", "/v1/models/x"),
        post("chat", "/v1/chat/completions", CHAT),
        post("chat stream", "/v1/chat/completions", {**STREAM, "stream_options": {"include_usage": True}}),
        post("chat thinks", "/v1/chat/completions", CHAT, says=THINKS),
        post("chat calls", "/v1/chat/completions", {**CHAT, "tools": [TOOL]}, says=CALLS),
        post("chat calls, streamed", "/v1/chat/completions", {**STREAM, "tools": [TOOL]}, says=CALLS),
        post("chat logprobs", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
        post("chat too long", "/v1/chat/completions", {**CHAT, "max_tokens": 5000}),
        post("chat unknown field", "/v1/chat/completions", {**CHAT, "temprature": 1}),
        post("chat other model", "/v1/chat/completions", {**CHAT, "model": "x"}),
        post("completion", "/v1/completions", {"model": "tiny", "prompt": "Hey", "logprobs": 1}),
        post("completion echo", "/v1/completions", {"model": "tiny", "prompt": "Hey", "echo": True, "logprobs": 1}),
        post("completion stream", "/v1/completions", {"model": "tiny", "prompt": "Hey", "stream": True}),
        post("chat rendered", "/v1/chat/completions/render", {**CHAT, "max_tokens": 5}),
        post("completions rendered", "/v1/completions/render", {"prompt": ["Hey", "Ho"], "max_tokens": 5}),
        post("embeddings", "/v1/embeddings", {"model": "tiny", "input": "Hey"}),
    ],
    "native": [
        post("generate", "/generate", {"text": "Hey", "return_logprob": True}),
        post("generate batch", "/generate", {"text": ["Hey", "Ho"], "sampling_params": {"max_new_tokens": 1}}),
        post("generate stream", "/generate", {"text": "Hey", "stream": True}),
        post("score", "/v1/score", {"query": "Hey", "items": ["Ho"], "label_token_ids": [39]}),
        post("score of two texts", "/score", {"text_1": "Hey", "text_2": "Ho"}),
        *(post(f"rerank {at}", at, {"query": "Hey", "documents": ["Ho"]}) for at in ("/v1/rerank", "/v2/rerank")),
        post("rerank", "/rerank", {"query": "Hey", "documents": ["Ho"]}),
        *(post(f"classify {at}", at, {"input": "Hey"}) for at in ("/v1/classify", "/classify")),
        post("tokenize", "/tokenize", {"prompt": "Hey"}),
        post("tokenize messages", "/tokenize", {"messages": USER}),
        post("tokenize, two", "/v1/tokenize", {"prompt": ["Hey", "Ho"], "return_token_strs": True}),
        post("detokenize, two", "/v1/detokenize", {"tokens": [[39], [68, 88]]}),
        get("tokenizer", "/tokenizer_info", only=("vocab_size",)),
        post("detokenize", "/detokenize", {"tokens": [39, 68, 88]}),
        post("separate reasoning", "/separate_reasoning", {"text": THINKS}),
        post("parse calls", "/parse_function_call", {"text": CALLS, "tools": [TOOL]}),
    ],
    "responses": [
        post("create", "/v1/responses", {**RESPONSE, "instructions": "Be kind."}, save="first"),
        post("continue", "/v1/responses", {**RESPONSE, "previous_response_id": "{first}"}, says=THINKS),
        post("stream", "/v1/responses", {**RESPONSE, "stream": True}, says=THINKS),
        post("calls, streamed", "/v1/responses", {**RESPONSE, "stream": True, "tools": [FLAT_TOOL]}, says=CALLS),
        post("count", "/v1/responses/input_tokens", {**RESPONSE, "previous_response_id": "{first}"}),
        get("get", "/v1/responses/{first}"),
        post("compact", "/v1/responses/compact", {**RESPONSE, "previous_response_id": "{first}"}),
        post("compact nothing", "/v1/responses/compact", {"model": "tiny"}),
        get("input items", "/v1/responses/{first}/input_items"),
        post("cancel what nobody waits for only", "/v1/responses/{first}/cancel"),
        post("background", "/v1/responses", {**RESPONSE, "background": True}, save="second"),
        get("background ends", "/v1/responses/{second}", until="completed"),
        post("cancel too late", "/v1/responses/{second}/cancel"),
        Ask("delete", "DELETE", "/v1/responses/{first}"),
        get("gone", "/v1/responses/{first}"),
        post("image", "/v1/responses", {"model": "tiny", "input": IMAGE}),
        post("rendered", "/v1/responses/render", {**RESPONSE, "max_output_tokens": 5}),
        post(
            "conversation", CONVERSATIONS, {"items": [{**USER[0], "id": "msg_a"}], "metadata": {"a": "b"}}, save="talk"
        ),
        post("within it", "/v1/responses", {**RESPONSE, "conversation": "{talk}"}),
        get("conversation shown", f"{CONVERSATIONS}/{{talk}}"),
        post("conversation changed", f"{CONVERSATIONS}/{{talk}}", {"metadata": {"a": "c"}}),
        post("items added", f"{CONVERSATIONS}/{{talk}}/items", {"items": USER}),
        get("items listed", f"{CONVERSATIONS}/{{talk}}/items"),
        get("item", f"{CONVERSATIONS}/{{talk}}/items/msg_a"),
        Ask("item deleted", "DELETE", f"{CONVERSATIONS}/{{talk}}/items/msg_a"),
        Ask("conversation deleted", "DELETE", f"{CONVERSATIONS}/{{talk}}"),
        get("conversation gone", f"{CONVERSATIONS}/{{talk}}"),
    ],
    "messages": [
        post("create", "/v1/messages", {**MESSAGE, "system": "Be kind."}),
        post("thinks", "/v1/messages", {**MESSAGE, "thinking": {"type": "enabled", "budget_tokens": 50}}, says=THINKS),
        post("stream", "/v1/messages", {**MESSAGE, "stream": True}, says=THINKS),
        post("calls, streamed", "/v1/messages", {**MESSAGE, "stream": True, "tools": [CLAUDE_TOOL]}, says=CALLS),
        post("count", "/v1/messages/count_tokens", {"model": "tiny", "messages": USER}),
        post("rendered", "/v1/messages/render", {**MESSAGE, "max_tokens": 5}),
        post("no limit", "/v1/messages", {"model": "tiny", "messages": USER}),
        post("other model", "/v1/messages", {**MESSAGE, "model": "x"}),
        post("batch", "/v1/messages/batches", {"requests": [{"custom_id": "a", "params": MESSAGE}]}, save="messages"),
        get("batch ends", "/v1/messages/batches/{messages}", until="ended"),
        get("results", "/v1/messages/batches/{messages}/results"),
        get("list batches", "/v1/messages/batches"),
        post("cancel too late", "/v1/messages/batches/{messages}/cancel"),
        Ask("delete", "DELETE", "/v1/messages/batches/{messages}"),
        get("gone", "/v1/messages/batches/{messages}"),
    ],
    "files": [
        post("upload", "/v1/files", form={"purpose": "batch"}, save="file"),
        post("upload for nothing", "/v1/files", form={"purpose": "fun"}),
        get("list files", "/v1/files"),
        get("file", "/v1/files/{file}"),
        get("content", "/v1/files/{file}/content"),
        post(
            "batch",
            "/v1/batches",
            {"input_file_id": "{file}", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
            save="batch",
        ),
        get("batch ends", "/v1/batches/{batch}", until="completed", save="done"),
        get("output", "/v1/files/{output}/content"),
        get("list batches", "/v1/batches"),
        post("cancel too late", "/v1/batches/{batch}/cancel"),
        Ask("delete", "DELETE", "/v1/files/{file}"),
        get("gone", "/v1/files/{file}"),
    ],
    "server": [
        get("livez", "/livez"),
        get("readyz", "/readyz"),
        get("health", "/health"),
        get("health by generating", "/health_generate"),
        get("ping", "/ping"),
        post("ping, posted", "/ping"),
        get("version", "/version", only=("none",)),
        get("loads", "/v1/loads", only=("dp_rank_count",)),
        get("usage", "/v1/usage", only=("object",)),
        get("model", "/model_info", only=("architecture", "context_length", "is_generation", "vocab_size")),
        get("model, SGLang's name", "/get_model_info", only=("served_model_names",)),
        get("server", "/server_info", only=("status", "max_total_num_tokens")),
        get("server, SGLang's name", "/get_server_info", only=("status",)),
        get("server, llama.cpp's names", "/props", only=("default_generation_settings", "total_slots", "modalities")),
        get("server, TGI's names", "/info", only=("model_id", "model_dtype", "max_input_tokens", "max_total_tokens")),
        get("plugins", "/v1/plugins", only=("object",)),
        get("steps", "/v1/steps", only=("none",)),
        get("metrics", "/metrics", only=("none",)),
        post("profile, where it is off", "/start_profile", {}),
        post("no profile", "/stop_profile"),
        post("flush", "/flush_cache"),
        post("abort", "/abort_request", {"rid": "nothing"}),
        post("abort what", "/abort_request", {}),
        get("no route", "/v2/chat"),
        get("stored completions", "/v1/chat/completions"),
        get("wrong method", "/v1/completions"),
        post("no JSON", "/v1/chat/completions", "{"),
    ],
    "stored": [
        post("keep", "/v1/chat/completions", {**CHAT, "store": True, "metadata": {"a": "b"}}, save="kept"),
        get("kept", "/v1/chat/completions/{kept}"),
        get("its messages", "/v1/chat/completions/{kept}/messages"),
        post("other metadata", "/v1/chat/completions/{kept}", {"metadata": {"c": "d"}}),
        get("list", "/v1/chat/completions?metadata[c]=d"),
        Ask("delete", "DELETE", "/v1/chat/completions/{kept}"),
        get("gone", "/v1/chat/completions/{kept}"),
    ],
}


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    from dovetail_parsers.reasoning.think_tags import Qwen3Reasoning
    from dovetail_parsers.tools.hermes import HermesTools

    storage = tmp_path_factory.mktemp("storage")
    running = Harness(
        folder, reasoning=Qwen3Reasoning(), tools=HermesTools(), file_storage_path=storage, min_free_disk_bytes=0
    )
    yield running
    running.close()


def send(server: Harness, ask: Ask, saved: dict[str, str]) -> requests.Response:
    """Send a request, again and again where it waits for a status."""
    path, body = filled(ask.path, saved), filled(ask.body, saved)
    options: dict[str, Any] = {"json": body} if body is not None else {}
    if isinstance(body, str):
        options = {"data": body, "headers": {"content-type": "application/json"}}
    if ask.form:
        options = {"files": {"file": ("in.jsonl", json.dumps(LINE) + "\n")}, "data": ask.form}
    server.text = ask.says
    deadline = time.monotonic() + 60
    while True:
        reply = server.http.request(ask.method, server.base + path, timeout=60, **options)
        if (
            not ask.until
            or ask.until in (reply.json().get("status"), reply.json().get("processing_status"))
            or time.monotonic() > deadline
        ):
            return reply
        time.sleep(0.02)


def filled(value: Any, saved: dict[str, str]) -> Any:
    """Put saved ids where their names stand."""
    if isinstance(value, dict):
        return {key: filled(item, saved) for key, item in value.items()}
    if isinstance(value, str) and "{" in value and value != "{":
        return re.sub(r"\{(\w+)\}", lambda match: saved[match[1]], value)
    return value


def record(reply: requests.Response, ask: Ask) -> dict[str, Any]:
    """Return what is compared of a reply."""
    kind = reply.headers.get("content-type", "").split(";")[0]
    found: dict[str, Any] = {"status": reply.status_code, "type": kind}
    if ask.only:
        body = reply.json() if kind == "application/json" else {}
        return {**found, "body": {key: body[key] for key in ask.only if key in body}}
    text = steady(reply.text)
    if kind == "text/event-stream":
        return {**found, "body": [block for block in text.split("\n\n") if block]}
    return {**found, "body": json.loads(text) if kind == "application/json" else text}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_reply_is_what_it_was(server: Harness, family: str) -> None:
    """Status, content type and body of each exchange are those on record."""
    server.reset()
    server.engine.per_delta = 1000  # what gathers while a reader is busy is one event: here all of it always is
    saved: dict[str, str] = {}
    found: dict[str, Any] = {}
    for ask in FAMILIES[family]:
        reply = send(server, ask, saved)
        if ask.save:
            saved[ask.save] = reply.json()["id"]
        if ask.save == "done":
            saved["output"] = reply.json()["output_file_id"]
        request = {"method": ask.method, "path": ask.path, **({} if ask.body is None else {"body": ask.body})}
        found[ask.name] = {"request": request, "reply": record(reply, ask)}
    path = GOLDEN / f"{family}.json"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    golden = json.loads(path.read_text("utf-8"))
    assert list(found) == list(golden)
    for name, exchange in found.items():
        assert exchange == golden[name], name


def test_every_route_has_an_exchange(server: Harness) -> None:
    """No documented route is without one."""
    asked = {(ask.method, re.sub(r"\{\w+\}", "{}", ask.path)) for family in FAMILIES.values() for ask in family}
    asked |= {(method, "/v1/models/{}") for method, path in asked if path.startswith("/v1/models/")}
    asked |= {(method, path.replace("/items/msg_a", "/items/{}")) for method, path in asked}
    for path, methods in server.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert (method.upper(), re.sub(r"\{\w+\}", "{}", path)) in asked, (method, path)
