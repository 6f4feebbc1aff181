"""Stored chat completions: what is kept, who sees it, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exchanges import error_of, events
from harness import Harness

from dovetail_server.errors.catalogue import ServiceError
from dovetail_server.storage.completions import CompletionStore

URL = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def keeping(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A server with a database of its own."""
    running = Harness(folder, file_storage_path=tmp_path_factory.mktemp("kept"))
    yield running
    running.close()


def ask(harness: Harness, **fields: Any) -> dict[str, Any]:
    reply = harness.post(URL, {"messages": USER, "store": True, **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def shown(harness: Harness, identifier: str, **kwargs: Any) -> Any:
    return harness.get(f"{URL}/{identifier}", **kwargs).json()


def test_what_is_kept_is_what_was_answered(keeping: Harness) -> None:
    """The reply, with its metadata; without `store`, nothing."""
    kept = ask(keeping, metadata={"a": "b"}, logprobs=True, top_logprobs=2, n=2)
    assert shown(keeping, kept["id"]) == {**kept, "metadata": {"a": "b"}}
    for fields in ({"store": False}, {"store": None}, {}):
        other = keeping.post(URL, {"messages": USER, **fields}).json()
        assert keeping.get(f"{URL}/{other['id']}").status_code == 404


def test_a_stream_is_kept_before_it_ends(keeping: Harness) -> None:
    """As the whole reply would have been, under the id of its chunks."""
    body = {"messages": USER, "store": True, "stream": True, "logprobs": True, "seed": 1}
    chunks = events(keeping.post(URL, body))
    found = shown(keeping, chunks[0]["id"])
    whole = ask(keeping, logprobs=True, seed=1)
    assert found["choices"] == whole["choices"]
    assert found["usage"] == whole["usage"]
    assert (found["metadata"], found["created"]) == ({}, chunks[0]["created"])


def test_a_name_of_the_clients_is_not_the_id(keeping: Harness) -> None:
    """Two replies of one `rid` are two; neither stands in another's way."""
    first, second = ask(keeping, rid="mine"), ask(keeping, rid="mine")
    assert len({first["id"], second["id"], "mine"}) == 3
    assert shown(keeping, first["id"])["id"] == first["id"]


def test_lists_are_filtered_and_paged(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """By model and metadata; from the oldest on, or from the newest."""
    server = make_harness(file_storage_path=tmp_path)
    assert server.get(URL).json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    ids = [ask(server, metadata={"n": str(at % 2), 'odd "key, é': "x"}, model="tiny")["id"] for at in range(5)]
    other = ask(server, model="tiny-too")["id"]

    def listed(query: str) -> list[str]:
        return [item["id"] for item in server.get(f"{URL}?{query}").json()["data"]]

    assert listed("") == [*ids, other]
    assert listed("order=desc") == [other, *ids[::-1]]
    assert listed("model=tiny-too") == [other]
    assert listed("metadata[n]=1") == [ids[1], ids[3]]
    assert listed('metadata[n]=1&metadata[odd "key, é]=y') == []
    assert listed('metadata[n]=1&metadata[odd "key, é]=x') == [ids[1], ids[3]]
    assert [listed(f"metadata[{key}") for key in ("key, é]=x", "N]=1", "n]=", "n]=%", 'n]=1"')] == [[]] * 5
    page = server.get(f"{URL}?limit=2&after={ids[1]}").json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids[2:4], True)
    assert (page["first_id"], page["last_id"]) == (ids[2], ids[3])
    assert listed("limit=0") == []
    assert error_of(server.get(f"{URL}?after=chatcmpl-none"))["param"] == "after"
    assert server.get(f"{URL}?limit=101").status_code == 400


def test_metadata_is_replaced_and_a_completion_deleted(keeping: Harness) -> None:
    """What was there before goes; what is deleted is gone."""
    identifier = ask(keeping, metadata={"a": "b"})["id"]
    for given, kept in (({"c": "d"}, {"c": "d"}), (None, {})):
        found = keeping.post(f"{URL}/{identifier}", {"metadata": given})
        assert found.json()["metadata"] == kept == shown(keeping, identifier)["metadata"]
    assert error_of(keeping.post(f"{URL}/{identifier}", {}))["param"] == "metadata"
    assert error_of(keeping.post(f"{URL}/{identifier}", {"metadata": {"k" * 65: "v"}}))["code"]
    gone = keeping.http.delete(f"{keeping.base}{URL}/{identifier}")
    assert gone.json() == {"id": identifier, "object": "chat.completion.deleted", "deleted": True}
    for reply in (
        keeping.get(f"{URL}/{identifier}"),
        keeping.get(f"{URL}/{identifier}/messages"),
        keeping.post(f"{URL}/{identifier}", {"metadata": {}}),
        keeping.http.delete(f"{keeping.base}{URL}/{identifier}"),
    ):
        assert (reply.status_code, error_of(reply)["code"]) == (404, "completion_not_found")


def test_messages_are_shown_as_they_were_sent(keeping: Harness) -> None:
    """Each with an id; parts stand beside a content of null. Large bodies, too, which another process reads."""
    parts = [{"type": "text", "text": "hi"}]
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": parts}]
    identifier = ask(keeping, messages=messages)["id"]
    found = keeping.get(f"{URL}/{identifier}/messages").json()
    assert found["data"] == [
        {"id": f"{identifier}-0", "role": "system", "content": "be short"},
        {"id": f"{identifier}-1", "role": "user", "content": None, "content_parts": parts},
    ]
    assert (found["first_id"], found["last_id"], found["has_more"]) == (f"{identifier}-0", f"{identifier}-1", False)
    page = keeping.get(f"{URL}/{identifier}/messages?order=desc&limit=1").json()
    assert (page["data"][0]["role"], page["has_more"]) == ("user", True)
    rest = keeping.get(f"{URL}/{identifier}/messages?after={identifier}-0").json()
    assert [item["role"] for item in rest["data"]] == ["user"]
    long = [{"role": "user", "content": "x" * 450, "note": "y" * (1 << 20)}]
    identifier = ask(keeping, messages=long)["id"]
    [message] = keeping.get(f"{URL}/{identifier}/messages").json()["data"]
    assert message == {"id": f"{identifier}-0", **long[0]}


def test_each_key_sees_its_own(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """Others get a 404, whatever they ask for."""
    server = make_harness(file_storage_path=tmp_path, api_key=["one", "two"])
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    identifier = server.post(URL, {"messages": USER, "store": True}, headers=one).json()["id"]
    assert shown(server, identifier, headers=one)["id"] == identifier
    assert server.get(URL, headers=two).json()["data"] == []
    for path in (identifier, f"{identifier}/messages"):
        assert server.get(f"{URL}/{path}", headers=two).status_code == 404
    assert server.post(f"{URL}/{identifier}", {"metadata": {}}, headers=two).status_code == 404
    assert server.http.delete(f"{server.base}{URL}/{identifier}", headers=two).status_code == 404
    assert shown(server, identifier, headers=one)["id"] == identifier


def test_the_oldest_go_first_and_none_are_kept_where_that_is_switched_off(
    make_harness: Callable[..., Harness], tmp_path: Path
) -> None:
    """The limits are those of responses, and do not count these with them."""
    server = make_harness(file_storage_path=tmp_path / "few", max_stored_responses=3)
    response = server.post("/v1/responses", {"input": "hi"}).json()
    ids = [ask(server)["id"] for _ in range(5)]
    assert [item["id"] for item in server.get(URL).json()["data"]] == ids[2:]
    assert server.get(f"/v1/responses/{response['id']}").status_code == 200
    none = make_harness(file_storage_path=tmp_path / "none", max_stored_responses=0)
    identifier = ask(none)["id"]
    assert none.get(f"{URL}/{identifier}").status_code == 404
    assert none.get(URL).json()["data"] == []
    assert not (tmp_path / "none").exists()


def test_what_ended_otherwise_is_not_kept(keeping: Harness) -> None:
    """A reply that failed is no completion."""
    before = len(keeping.get(f"{URL}?limit=100").json()["data"])
    assert keeping.post(URL, {"messages": USER, "store": True, "temperature": -1}).status_code == 400
    assert len(keeping.get(f"{URL}?limit=100").json()["data"]) == before


def test_a_reply_that_cannot_be_kept_is_given_out(
    keeping: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has been paid for; the log says that it was not kept."""

    async def fail(*args: Any) -> None:
        raise ServiceError("the disk is full", code="storage_unavailable")

    monkeypatch.setattr(CompletionStore, "put", fail)
    with caplog.at_level("WARNING"):
        found = ask(keeping)
    assert found["choices"][0]["message"]["content"]
    assert keeping.get(f"{URL}/{found['id']}").status_code == 404
    assert any(found["id"] in record.getMessage() for record in caplog.records)


def test_a_route_of_a_peers_that_looks_like_an_id_says_why(keeping: Harness) -> None:
    """vLLM has `/batch` there."""
    error = error_of(keeping.post(f"{URL}/batch", {"metadata": None}))
    assert "/v1/batches" in error["message"]
