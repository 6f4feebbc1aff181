"""What one key keeps is not there for another: every route with an identifier, and every field that names one."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from harness import Harness

ALICE, BOB, ADMIN = "sk-alice", "sk-bob", "sk-admin"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SAID = [{"role": "user", "content": "a secret"}]
ITEM = "msg_of_alice"
MODELS = "model_id"
"""The only thing with an identifier that belongs to everybody."""


def as_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keyed(make_harness: Callable[..., Harness], tmp_path: Any) -> Harness:
    return make_harness(api_key=[ALICE, BOB], admin_api_key=ADMIN, file_storage_path=tmp_path, min_free_disk_bytes=0)


def made_by_alice(keyed: Harness) -> dict[str, str]:
    """Keep one thing of each kind; returns their identifiers by the name of the path's parameter."""

    def post(path: str, body: Any, **more: Any) -> str:
        reply = keyed.post(path, body, headers=as_key(ALICE), **more)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["id"])

    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "tiny", "messages": SAID}}
    file = {"file": ("in.jsonl", json.dumps(line).encode() + b"\n")}
    file_id = post("/v1/files", None, files=file, data={"purpose": "batch"})
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    one = {"custom_id": "a", "params": {"model": "tiny", "max_tokens": 5, "messages": SAID}}
    return {
        "file_id": file_id,
        "batch_id": post("/v1/batches", asked),
        "message_batch_id": post("/v1/messages/batches", {"requests": [one]}),
        "response_id": post(RESPONSES, {"model": "tiny", "input": "a secret", "store": True}),
        "completion_id": post(CHAT, {"model": "tiny", "messages": SAID, "store": True}),
        "conversation_id": post("/v1/conversations", {"items": [{**SAID[0], "id": ITEM}]}),
    }


def unknown(identifier: str) -> str:
    """Return an identifier of the same form that nothing has."""
    return re.sub(r"[0-9a-f]{8}$", "00000000", identifier)


def plain(text: str, identifier: str) -> str:
    return re.sub(r"req_[0-9a-f]+", "REQUEST", text).replace(identifier, "ID")


def test_what_somebody_else_keeps_looks_as_if_it_were_not_there(keyed: Harness) -> None:
    """Each method of each path with an identifier: another key, and the admin's, gets what an unknown one gets."""
    made = made_by_alice(keyed)
    paths = keyed.get("/openapi.json", headers=as_key(ADMIN)).json()["paths"]
    tried = set()
    for path, methods in paths.items():
        path = path.replace("{item_id}", ITEM)
        names = [name for name in re.findall(r"{(\w+)}", path) if name != MODELS]
        if not names:
            continue
        (name,) = names
        for method in methods:
            body = {"json": {"metadata": {"a": "b"}}} if method == "post" and path.endswith("}") else {}
            if method == "post" and path.endswith("/items"):
                body = {"json": {"items": SAID}}
            for key in (BOB, ADMIN):
                found = {}
                for identifier in (made[name], unknown(made[name])):
                    url = keyed.base + path.replace(f"{{{name}}}", identifier)
                    reply = keyed.http.request(method, url, headers=as_key(key), timeout=60, **body)
                    assert reply.status_code == 404, (method, path, reply.text)
                    found[identifier] = plain(reply.text, identifier)
                assert len(set(found.values())) == 1, found
        tried.add(name)
    assert tried == made.keys()
    for path in ("/v1/files", "/v1/batches", "/v1/messages/batches", CHAT):
        for key in (BOB, ADMIN):
            assert keyed.get(path, headers=as_key(key)).json()["data"] == [], path
        assert keyed.get(path, headers=as_key(ALICE)).json()["data"], path
    for name, path in (("response_id", RESPONSES), ("completion_id", CHAT), ("file_id", "/v1/files")):
        assert keyed.get(f"{path}/{made[name]}", headers=as_key(ALICE)).status_code == 200


@pytest.mark.sampled
@pytest.mark.parametrize("route", [RESPONSES, "/v1/responses/input_tokens", "/v1/responses/compact"])
@pytest.mark.parametrize("kind", ["previous", "item"])
def test_nobody_goes_on_with_what_is_somebody_elses(keyed: Harness, route: str, kind: str) -> None:
    """Neither by `previous_response_id` nor by an item's identifier; no less so in a large body."""
    response = keyed.post(RESPONSES, {"model": "tiny", "input": "a secret"}, headers=as_key(ALICE)).json()
    item = response["output"][0]["id"]
    for text in ("hi", "x" * 100_000):
        found = {}
        for identifier in ((response["id"], item), (unknown(response["id"]), item.replace("o", "o0", 1))):
            body: dict[str, Any] = {"model": "tiny", "input": [{"role": "user", "content": text}]}
            if kind == "previous":
                body["previous_response_id"] = identifier[0]
            else:
                body["input"].append({"type": "item_reference", "id": identifier[1]})
            reply = keyed.post(route, body, headers=as_key(BOB))
            assert reply.status_code in (400, 404), reply.text
            assert "secret" not in reply.text
            found[identifier] = plain(plain(reply.text, identifier[0]), identifier[1])
        assert len(set(found.values())) == 1, found
    prompts = [keyed.tokenizer.decode(s.prompt_ids, skip_special_tokens=False) for s in keyed.engine.submits]
    assert [at for at, prompt in enumerate(prompts) if "secret" in prompt] == [0]


def test_identifiers_that_clients_choose_are_only_labels(make_harness: Callable[..., Harness], tmp_path: Any) -> None:
    """The same `rid`, `user`, `cache_salt`, `x-request-id` and `custom_id` of two keys: each gets its own reply."""
    keyed = make_harness(api_key=[ALICE, BOB], file_storage_path=tmp_path, min_free_disk_bytes=0)
    keyed.engine.hold.clear()
    same = {"rid": "1", "user": "u", "cache_salt": "s", "prompt_cache_key": "k", "safety_identifier": "i"}
    replies: dict[str, Any] = {}

    def ask(key: str) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": key}], **same, "store": True}
        replies[key] = keyed.http.post(
            keyed.base + CHAT, json=body, headers={**as_key(key), "x-request-id": "same"}, timeout=60
        )

    threads = [threading.Thread(target=ask, args=(key,)) for key in (ALICE, BOB)]
    for thread in threads:
        thread.start()
    keyed.eventually(lambda: len(keyed.engine.submits) == 2)
    assert keyed.post("/abort_request", {"rid": "1"}, headers=as_key(BOB)).json() == {"aborted": 1}
    keyed.engine.hold.set()
    for thread in threads:
        thread.join(60)
    assert replies[ALICE].status_code == 200, replies[ALICE].text
    assert replies[BOB].status_code == 400, replies[BOB].text
    stored = keyed.get(CHAT, headers=as_key(ALICE)).json()["data"]
    assert [each["id"] for each in stored] == [replies[ALICE].json()["id"]]
    assert keyed.get(CHAT, headers=as_key(BOB)).json()["data"] == []


def test_only_the_admin_empties_the_cache(keyed: Harness) -> None:
    """It is everybody's."""
    assert keyed.post("/flush_cache", headers=as_key(BOB)).status_code in (401, 403)
    assert keyed.post("/flush_cache", headers=as_key(ADMIN)).status_code == 200
