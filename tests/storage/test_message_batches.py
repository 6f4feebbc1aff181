"""`/v1/messages/batches` on durable batches, with Anthropic's own client and by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from .conftest import Api

USER = [{"role": "user", "content": "hi"}]
PATH = "/v1/messages/batches"


def entry(custom_id: str, **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": {"model": "tiny", "max_tokens": 50, "messages": USER, **changes}}


@pytest.fixture
def client(api: Api) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=api.harness.base, api_key="none", _strict_response_validation=True) as made:
        yield made


def ended(client: anthropic.Anthropic, batch_id: str) -> Any:
    deadline = time.monotonic() + 60
    while (batch := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def test_anthropics_client_runs_a_batch(client: anthropic.Anthropic) -> None:
    """Created, followed, its results read one by one, listed and deleted, all of it by the strict client."""
    asked = [entry("good"), entry("wrong", temperature=-1), entry("à".encode().hex()), entry("streams", stream=True)]
    made = client.messages.batches.create(requests=asked)  # type: ignore[arg-type]
    assert (made.id[:9], made.processing_status, made.request_counts.processing) == ("msgbatch_", "in_progress", 4)
    assert (made.results_url, made.ended_at) == (None, None)
    batch = ended(client, made.id)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 2, 2)
    results = {item.custom_id: item.result for item in client.messages.batches.results(made.id)}
    assert set(results) == {"good", "wrong", "c3a0", "streams"}
    good, wrong = results["good"], results["wrong"]
    assert good.type == "succeeded"
    assert (good.message.content[0].text, good.message.stop_reason) == ("Hello, world", "end_turn")  # type: ignore[union-attr]
    assert wrong.type == "errored"
    assert wrong.error.error.type == "invalid_request_error"
    assert "temperature" in wrong.error.error.message
    assert [item.id for item in client.messages.batches.list()] == [made.id]
    assert client.messages.batches.cancel(made.id).processing_status == "ended"
    assert client.messages.batches.delete(made.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(made.id)


def test_usage_and_files_are_those_of_durable_batches(api: Api, client: anthropic.Anthropic) -> None:
    """`/v1/batches` shows the same batch with its tokens; what was asked and answered goes with it."""
    made = client.messages.batches.create(requests=[entry("a"), entry("b")])  # type: ignore[list-item]
    ended(client, made.id)
    batch = api.batch(made.id.replace("msgbatch_", "batch_"))
    assert (batch["endpoint"], batch["status"]) == ("/v1/messages", "completed")
    assert batch["usage"]["output_tokens"] > 0
    assert batch["usage"]["input_tokens_details"]["cached_tokens"] > 0
    client.messages.batches.delete(made.id)
    assert api.harness.get("/v1/files").json()["data"] == []


def test_lines_of_a_file_may_be_messages(api: Api) -> None:
    """`/v1/batches` takes the endpoint, too."""
    line = {"custom_id": "x", "method": "POST", "url": "/v1/messages", "body": entry("x")["params"]}
    batch = api.run(line, endpoint="/v1/messages")
    [output], _ = api.results(batch)
    assert output["response"]["body"]["type"] == "message"


def test_pages_go_both_ways(client: anthropic.Anthropic) -> None:
    """Newest first; behind one, or right before one."""
    ids = [client.messages.batches.create(requests=[entry("a")]).id for _ in range(4)][::-1]  # type: ignore[list-item]
    assert [item.id for item in client.messages.batches.list(limit=3)] == ids
    first = client.messages.batches.list(limit=2)
    assert ([item.id for item in first.data], first.has_more) == (ids[:2], True)
    after = client.messages.batches.list(limit=2, after_id=ids[1])
    assert ([item.id for item in after.data], after.has_more) == (ids[2:], False)
    before = client.messages.batches.list(limit=2, before_id=ids[3])
    assert ([item.id for item in before.data], before.has_more) == (ids[1:3], True)


def test_a_cancelled_batch_says_what_became_of_each(api: Api, client: anthropic.Anthropic) -> None:
    """What was not answered is `canceled`; until it has ended there are no results, and it is not deleted."""
    api.harness.engine.hold.clear()
    made = client.messages.batches.create(requests=[entry(str(n)) for n in range(3)])  # type: ignore[misc]
    for path in (f"{PATH}/{made.id}/results",):
        assert api.harness.get(path).json()["error"]["type"] == "invalid_request_error"
    assert api.harness.http.delete(f"{api.harness.base}{PATH}/{made.id}", timeout=30).status_code == 400
    assert client.messages.batches.cancel(made.id).processing_status in ("canceling", "ended")
    api.harness.engine.hold.set()
    counts = ended(client, made.id).request_counts
    assert counts.canceled + counts.succeeded == 3
    kinds = [item.result.type for item in client.messages.batches.results(made.id)]
    assert (kinds.count("canceled"), len(kinds)) == (counts.canceled, 3)


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"requests": []}, 400, "1 to"),
        ({}, 400, "requests"),
        ({"requests": [entry("a"), entry("a")]}, 400, "twice"),
        ({"requests": [entry("a b")]}, 400, "letters"),
        ({"requests": [entry("")]}, 400, "letters"),
        ({"requests": [entry("a", model="x")]}, 404, "does not exist"),
        ({"requests": [{"custom_id": "a", "params": 3}]}, 400, "object"),
        ({"requests": [{"custom_id": "a", "payload": {}}]}, 400, "payload"),
        ({"requests": [entry("a")], "betas": 1}, 400, "betas"),
        ("{", 400, "truncated"),
        ([], 400, "batch of messages"),
    ],
)
def test_a_bad_batch_is_refused_as_a_whole(shared: Api, body: Any, status: int, part: str) -> None:
    """Anthropic's error names what is wrong; nothing is kept."""
    data = body if isinstance(body, str) else json.dumps(body)
    reply = shared.harness.post(PATH, data=data, headers={"content-type": "application/json"})
    found = reply.json()
    assert (reply.status_code, found["type"]) == (status, "error"), reply.text
    assert part in found["error"]["message"]


def test_other_batches_are_none_of_these(shared: Api) -> None:
    """A batch of chat requests, and ids that are none, are 404 here."""
    line = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": USER}}
    other = shared.start(line)
    for name in (other, other.replace("batch_", "msgbatch_"), "msgbatch_1", "x"):
        for method, end in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
            url = f"{shared.harness.base}{PATH}/{name}{end}"
            assert shared.harness.http.request(method, url, timeout=30).status_code == 404
    assert shared.harness.get(f"{PATH}?after_id={other}").status_code == 404
    both = shared.harness.get(f"{PATH}?after_id=msgbatch_1&before_id=msgbatch_2")
    assert both.status_code == 400


def test_a_large_batch_is_taken_in_one_piece(api: Api, client: anthropic.Anthropic) -> None:
    """A megabyte of requests, with line breaks inside their JSON."""
    requests = [entry(f"r{n}", system="long " * 20) for n in range(2000)]
    raw = json.dumps({"requests": requests}, indent=1)
    assert len(raw) > 1 << 19
    reply = api.harness.post(PATH, data=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 200, reply.text
    client.messages.batches.cancel(reply.json()["id"])
    counts = ended(client, reply.json()["id"]).request_counts
    assert counts.succeeded + counts.canceled + counts.errored in (0, 2000)
    assert counts.errored == 0


@pytest.mark.parametrize(
    "requests",
    [
        [entry("a", system='"\\\n' * 20_000), entry("b\n")],
        [entry("a", system='"\\\n' * 20_000), entry("a")],
        [entry("a", system='"\\\n' * 20_000), entry("b", model="another")],
        [entry(f"r{n}") for n in range(60_000)],
        [entry("a", system='"\\\n' * 20_000), entry("b", model="default")],
    ],
    ids=["name", "twice", "model", "too many", "good"],
)
def test_a_large_body_is_read_elsewhere(shared: Api, requests: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it holds Python's lock for as long as it takes; a process of its own says the same of it."""
    bodies, seen = shared.harness.state.bodies, []
    run = bodies.run

    async def noted(task: Any, raw: bytes, **rest: Any) -> Any:
        seen.append(task.name)
        return await run(task, raw, **rest)

    monkeypatch.setattr(bodies, "run", noted)
    raw, kind = json.dumps({"requests": requests}), {"content-type": "application/json"}
    there = shared.harness.post(PATH, data=raw, headers=kind)
    assert seen.count("message_batch") == 1  # its lines are read beside it
    monkeypatch.setattr(bodies, "takes", lambda num_bytes: False)
    here = shared.harness.post(PATH, data=raw, headers=kind)
    assert seen.count("message_batch") == 1
    assert there.status_code == here.status_code
    names = ("error", "processing_status", "request_counts")
    assert [there.json().get(name) for name in names] == [here.json().get(name) for name in names]
