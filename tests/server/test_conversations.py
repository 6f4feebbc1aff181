"""`/v1/conversations`: items that responses go on with, as openai-python's types have them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from exchanges import error_of, send_raw
from harness import Harness
from openai import OpenAI
from replies import response_events

URL = "/v1/conversations"
SAID = {"type": "message", "role": "user", "content": "remember 7"}
ALICE, BOB = "sk-alice", "sk-bob"


@pytest.fixture
def talking(make_harness: Callable[..., Harness], tmp_path: Path) -> Harness:
    return make_harness(context_len=8192, file_storage_path=tmp_path, min_free_disk_bytes=0)


def begin(server: Harness, **fields: Any) -> str:
    reply = server.post(URL, fields)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def items_of(server: Harness, conversation: str) -> list[dict[str, Any]]:
    reply = server.get(f"{URL}/{conversation}/items", params={"order": "asc", "limit": 100})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["data"])


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


def respond(server: Harness, conversation: Any, said: str = "hi", **fields: Any) -> Any:
    return server.post("/v1/responses", {"model": "tiny", "input": said, "conversation": conversation, **fields})


def test_with_openais_client(talking: Harness) -> None:
    """Its client creates, shows, changes and deletes conversations and their items."""
    api = OpenAI(base_url=f"{talking.base}/v1", api_key="none")
    client = api.conversations
    made = client.create(items=[{"role": "user", "content": "a"}], metadata={"k": "v"})
    assert (made.object, made.metadata) == ("conversation", {"k": "v"})
    assert client.retrieve(made.id) == made
    assert client.update(made.id, metadata={"k": "w"}).metadata == {"k": "w"}
    added = client.items.create(
        made.id, items=[{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    )
    assert [item.content[0].text for item in added.data] == ["b", "c"]
    found = list(client.items.list(made.id, limit=2, order="asc"))
    assert [item.content[0].text for item in found] == ["a", "b", "c"]
    assert [item.id for item in client.items.list(made.id)] == [item.id for item in reversed(found)]
    assert client.items.retrieve(found[0].id, conversation_id=made.id) == found[0]
    assert client.items.delete(found[0].id, conversation_id=made.id).id == made.id
    assert [item.id for item in client.items.list(made.id, order="asc")] == [item.id for item in found[1:]]
    assert client.delete(made.id).deleted
    api.close()
    assert talking.get(f"{URL}/{made.id}").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [True, False])
def test_a_response_goes_on_with_it(talking: Harness, stream: bool, store: bool) -> None:
    """The items stand before the input, as if they had been sent; input and output are added, stored or not."""
    conversation = begin(talking, items=[SAID])
    given = conversation if stream else {"id": conversation}
    reply = respond(talking, given, "and?", stream=stream, store=store)
    body = response_events(reply)[-1]["response"] if stream else reply.json()
    assert (body["conversation"], body["store"]) == ({"id": conversation}, store)
    prompt = talking.engine.submits[-1].prompt_ids
    talking.post("/v1/responses", {"model": "tiny", "input": [SAID, {"role": "user", "content": "and?"}]})
    assert talking.engine.submits[-1].prompt_ids == prompt
    found = items_of(talking, conversation)
    assert texts(found) == ["remember 7", "and?", "Hello, world"]
    assert found[-1]["id"] == body["output"][0]["id"]
    respond(talking, conversation, "more")
    assert texts(items_of(talking, conversation)) == ["remember 7", "and?", "Hello, world", "more", "Hello, world"]
    counted = talking.post("/v1/responses/input_tokens", {"model": "tiny", "input": "x", "conversation": conversation})
    assert counted.json()["input_tokens"] > len(prompt)


def test_in_the_background_and_in_large(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """So it is with a response that nobody waits for, and with a body that another process reads."""
    server = make_harness(context_len=1 << 17, file_storage_path=tmp_path, min_free_disk_bytes=0, body_processes=1)
    conversation = begin(server)
    made = respond(server, conversation, "hi", background=True).json()
    server.eventually(lambda: server.get(f"/v1/responses/{made['id']}").json()["status"] == "completed")
    assert texts(items_of(server, conversation)) == ["hi", "Hello, world"]
    long = "hello " * 20_000
    assert respond(server, conversation, long).status_code == 200
    assert texts(items_of(server, conversation))[2:] == [long, "Hello, world"]
    assert respond(server, conversation, "short").status_code == 200
    assert len(server.engine.submits[-1].prompt_ids) > 20_000


def test_a_turn_of_many_items(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """More than a statement of the database may have values: the model is told of none of these, so they fit."""
    server = make_harness(file_storage_path=tmp_path, min_free_disk_bytes=0)
    conversation = begin(server)
    found = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    many: Any = [*([found] * 40_000), SAID]
    assert respond(server, conversation, many, store=False).status_code == 200
    page = server.get(f"{URL}/{conversation}/items", params={"limit": 2}).json()
    assert texts(page["data"]) == ["Hello, world", "remember 7"]
    assert error_of(respond(server, conversation))["code"] == "conversation_full"


def test_what_fails_adds_nothing(talking: Harness) -> None:
    """A response that is refused leaves the conversation as it was."""
    conversation = begin(talking, items=[SAID])
    assert respond(talking, conversation, temperature=-1).status_code == 400
    assert error_of(respond(talking, conversation, previous_response_id="resp_1"))["param"] == "conversation"
    assert error_of(respond(talking, {"id": "conv_none"}))["code"] == "conversation_not_found"
    assert respond(talking, 7).status_code == 400
    assert texts(items_of(talking, conversation)) == ["remember 7"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_adds_nothing(talking: Harness, stream: bool) -> None:
    """In the middle of a turn: neither its input nor a half reply; the next turn goes on as if there had been none."""
    conversation = begin(talking, items=[SAID])
    talking.text, talking.engine.delay_s = "word " * 400, 0.01
    body = {"model": "tiny", "input": "lost", "conversation": conversation, "stream": stream}
    client = send_raw(talking, "/v1/responses", body)
    talking.eventually(lambda: talking.engine.step > 3)
    client.close()
    talking.eventually(lambda: talking.state.num_live == 0)
    assert texts(items_of(talking, conversation)) == ["remember 7"]
    talking.reset()
    assert respond(talking, conversation, "more").status_code == 200
    assert texts(items_of(talking, conversation)) == ["remember 7", "more", "Hello, world"]


def test_many_at_once_lose_nothing(talking: Harness) -> None:
    """Each turn is added whole, whoever else writes."""
    conversation = begin(talking)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda n: respond(talking, conversation, f"q{n}").status_code, range(24)))
    assert set(replies) == {200}
    found = texts(items_of(talking, conversation))
    assert sorted(found[::2]) == sorted(f"q{n}" for n in range(24))
    assert set(found[1::2]) == {"Hello, world"}


def test_an_identifier_is_given_once(talking: Harness) -> None:
    """Items that a client sends twice are two, the later of which gets a name of its own."""
    item = {**SAID, "id": "msg_mine"}
    conversation = begin(talking, items=[item, item])
    talking.post(f"{URL}/{conversation}/items", {"items": [item]})
    assert respond(talking, conversation, [item]).status_code == 200
    names = [found["id"] for found in items_of(talking, conversation)]
    assert (len(set(names)), names.count("msg_mine")) == (5, 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": [SAID] * 21}, "items"),
        ({"items": [{"type": "no-such"}]}, "items[0]"),
        ({"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0].type"),
        ({"items": [{**SAID, "content": [{"type": "input_image", "image_url": "x"}]}]}, "items[0].content[0]"),
        ({"items": "hi"}, "items"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_what_is_refused(talking: Harness, fields: dict[str, Any], param: str) -> None:
    """Naming the field; nothing is made."""
    reply = talking.post(URL, fields)
    assert reply.status_code == 400
    assert param in reply.text


def test_pages(talking: Harness) -> None:
    """As OpenAI's; what is not there is a 404."""
    conversation = begin(talking, items=[{**SAID, "content": str(n)} for n in range(5)])
    path = f"{URL}/{conversation}/items"
    page = talking.get(path, params={"limit": 2, "order": "asc"}).json()
    assert (texts(page["data"]), page["has_more"]) == (["0", "1"], True)
    rest = talking.get(path, params={"after": page["last_id"], "order": "asc"}).json()
    assert (texts(rest["data"]), rest["has_more"]) == (["2", "3", "4"], False)
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "no"}):
        assert talking.get(path, params=wrong).status_code == 400
    assert error_of(talking.get(path, params={"after": "msg_none"}))["param"] == "after"
    assert error_of(talking.get(f"{path}/msg_none"))["code"] == "item_not_found"
    assert talking.http.delete(f"{talking.base}{path}/msg_none", timeout=60).status_code == 404
    assert talking.get(f"{URL}/conv_none/items").status_code == 404


def test_one_key_sees_nothing_of_anothers(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """Every route, and the field of a response, answers as if there were none."""
    server = make_harness(api_key=[ALICE, BOB], file_storage_path=tmp_path, min_free_disk_bytes=0)
    alice, bob = ({"authorization": f"Bearer {key}"} for key in (ALICE, BOB))
    conversation = server.post(URL, {"items": [{**SAID, "id": "msg_1"}]}, headers=alice).json()["id"]
    path = f"{URL}/{conversation}"
    for method, where, body in (
        ("GET", path, None),
        ("POST", path, {"metadata": {}}),
        ("DELETE", path, None),
        ("GET", f"{path}/items", None),
        ("POST", f"{path}/items", {"items": [SAID]}),
        ("GET", f"{path}/items/msg_1", None),
        ("DELETE", f"{path}/items/msg_1", None),
        ("POST", "/v1/responses", {"model": "tiny", "input": "x", "conversation": conversation}),
    ):
        reply = server.http.request(method, server.base + where, json=body, headers=bob, timeout=60)
        assert (reply.status_code, error_of(reply)["code"]) == (404, "conversation_not_found"), (method, where)
    found = server.get(f"{path}/items", headers=alice).json()["data"]
    assert [item["id"] for item in found] == ["msg_1"]


def test_the_oldest_go(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """Beyond the number and the size, with their items; a conversation alone is bounded, too."""
    server = make_harness(
        file_storage_path=tmp_path, min_free_disk_bytes=0, max_stored_responses=3, max_body_bytes=1 << 16
    )
    names = [begin(server, items=[SAID]) for _ in range(5)]
    assert [server.get(f"{URL}/{name}").status_code for name in names] == [404, 404, 200, 200, 200]
    database = next(tmp_path.rglob("*.sqlite*"), None) or next(tmp_path.rglob("*.db"))
    with sqlite3.connect(database) as db:
        assert db.execute("select count(*) from conversation_items").fetchone() == (3,)
    big = {**SAID, "content": "x" * 30_000}
    path = f"{URL}/{names[-1]}/items"
    assert server.post(path, {"items": [big]}).status_code == 200
    assert server.post(path, {"items": [big]}).status_code == 200
    assert error_of(server.post(path, {"items": [big]}))["code"] == "conversation_full"


def test_it_expires(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """So long after its last item."""
    server = make_harness(file_storage_path=tmp_path, min_free_disk_bytes=0, stored_response_ttl=1)
    conversation = begin(server, items=[SAID])
    server.eventually(lambda: server.get(f"{URL}/{conversation}").status_code == 404)


def test_a_server_that_stores_nothing(make_harness: Callable[..., Harness]) -> None:
    """Says so."""
    server = make_harness(max_stored_responses=0)
    assert "--max-stored-responses" in error_of(server.post(URL, {}))["message"]
    assert server.get(f"{URL}/conv_1").status_code == 404
    assert "--max-stored-responses" in error_of(respond(server, "conv_1"))["message"]
