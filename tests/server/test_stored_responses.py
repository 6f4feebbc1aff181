"""Responses that are kept, or generated in the background, over a real HTTP server whose model says what it is told."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from exchanges import error_of
from harness import Harness
from replies import fold_response, response_events, strict_response, text_of
from response_requests import ask, prompt_of, refused

from dovetail_server.apis.responses.background import (
    LOG_BYTES,
    LOG_S,
    MAX_LOG_BYTES,
    BackgroundResponses,
    LiveResponse,
)
from dovetail_server.storage import database
from dovetail_server.supervision.supervisor import Supervisor


def test_stored_responses_are_fetched_listed_and_deleted(harness: Harness) -> None:
    """A response is there as it was returned, with its input, until it is deleted."""
    first = ask(harness, "one")
    found = ask(harness, "two", previous_response_id=first["id"])
    assert harness.get(f"/v1/responses/{found['id']}").json() == found
    page = harness.get(f"/v1/responses/{found['id']}/input_items", params={"limit": 2}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["two", "Hello, world"]
    assert page["has_more"] is True
    rest = harness.get(f"/v1/responses/{found['id']}/input_items", params={"after": page["last_id"]}).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["one"]
    assert rest["has_more"] is False
    assert harness.http.delete(f"{harness.base}/v1/responses/{found['id']}").json()["deleted"] is True
    gone = harness.get(f"/v1/responses/{found['id']}")
    assert (gone.status_code, error_of(gone)["code"]) == (404, "response_not_found")
    assert refused(harness, 404, previous_response_id=found["id"])["code"] == "previous_response_not_found"
    assert refused(harness, 404, given=[{"type": "item_reference", "id": "msg_1"}])["param"] == "input[0].id"
    bad = harness.get(f"/v1/responses/{first['id']}/input_items", params={"after": "zz"})
    assert error_of(bad)["param"] == "after"


def test_what_is_not_to_be_stored_is_not(harness: Harness) -> None:
    """`store: false` leaves nothing behind, also of a stream."""
    found = ask(harness, store=False)
    assert found["store"] is False
    assert harness.get(f"/v1/responses/{found['id']}").status_code == 404
    body = {"model": "tiny", "input": "hi", "store": False, "stream": True}
    last = response_events(harness.post("/v1/responses", body))[-1]["response"]
    assert harness.get(f"/v1/responses/{last['id']}").status_code == 404


def test_a_locked_database_refuses_what_asks_to_be_stored(
    make_harness: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is generated, and all at once; what does not ask for it is returned, not stored."""
    monkeypatch.setattr(database, "BUSY_S", 0.3)
    server = make_harness(file_storage_path=tmp_path)
    assert ask(server, store=True)["store"] is True
    num = len(server.engine.submits)
    with contextlib.closing(sqlite3.connect(next(tmp_path.rglob("dovetail.db")), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: refused(server, 503, store=True), range(8)))
        assert {error["type"] for error in found} == {"server_error"}
        assert time.monotonic() - began < 3
        assert len(server.engine.submits) == num
        assert ask(server)["store"] is False
        other.execute("ROLLBACK")
    assert ask(server, store=True)["store"] is True


def test_a_server_can_store_nothing(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """With `--max-stored-responses 0` replies say so, no database is made, and asking for it is refused."""
    server = make_harness(max_stored_responses=0, file_storage_path=tmp_path / "none")
    assert ask(server)["store"] is False
    assert server.get("/v1/responses/resp_x").status_code == 404
    assert server.http.delete(f"{server.base}/v1/responses/resp_x").status_code == 404
    assert not (tmp_path / "none").exists()
    assert refused(server, store=True)["code"] == "unsupported_parameter"
    assert refused(server, background=True)["param"] == "background"


def test_the_oldest_responses_go_first(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """Number and age of what a key stores are bounded; one key's flood does not touch another's responses."""
    keys = ["sk-alice-1f6c", "sk-bob-77aa"]
    server = make_harness(max_stored_responses=4, file_storage_path=tmp_path, api_key=keys)
    alice, bob = ({"authorization": f"Bearer {key}"} for key in keys)
    body = {"model": "tiny", "input": "x"}
    kept = server.post("/v1/responses", body, headers=alice).json()["id"]
    ids = [server.post("/v1/responses", body, headers=bob).json()["id"] for _ in range(8)]
    statuses = [server.get(f"/v1/responses/{each}", headers=bob).status_code for each in ids]
    assert statuses[-4:] == [200] * 4
    assert statuses[0] == 404
    assert server.get(f"/v1/responses/{kept}", headers=alice).status_code == 200
    with sqlite3.connect(tmp_path / "dovetail.db") as db:
        assert db.execute("select count(*) from responses").fetchone()[0] <= 6
        db.execute("update responses set expires_at = 1")
    assert server.get(f"/v1/responses/{kept}", headers=alice).status_code == 404


def test_responses_survive_a_restart(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """Another server on the same folder continues a conversation; what its server left half done failed."""
    first = make_harness(file_storage_path=tmp_path)
    found = ask(first, "remember me")
    left = ask(first, "x")
    first.close()
    with sqlite3.connect(tmp_path / "dovetail.db") as db:
        change = "update responses set status = 'in_progress', process = 'gone-1-2' where id = ?"
        db.execute(change, (left["id"],))
    second = make_harness(file_storage_path=tmp_path)
    ask(second, "go on", previous_response_id=found["id"])
    assert "remember me" in prompt_of(second)
    second.eventually(lambda: second.get(f"/v1/responses/{left['id']}").json()["status"] == "failed")


def test_owners_do_not_see_each_other(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    """A response is its key's: others cannot read, follow, continue, delete or cancel it."""
    server = make_harness(file_storage_path=tmp_path, api_key=["sk-alice-1f6c", "sk-bob-77aa"])
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("sk-alice-1f6c", "sk-bob-77aa"))
    body = {"model": "tiny", "input": "hi", "background": True}
    path = f"/v1/responses/{server.post('/v1/responses', body, headers=alice).json()['id']}"
    server.eventually(lambda: server.get(path, headers=alice).json()["status"] == "completed")
    replies = [
        server.get(path, headers=bob),
        server.get(f"{path}/input_items", headers=bob),
        server.get(path, params={"stream": "true"}, headers=bob),
        server.post(f"{path}/cancel", headers=bob),
        server.http.delete(server.base + path, headers=bob),
        server.post("/v1/responses", {**body, "previous_response_id": path.rsplit("/", 1)[1]}, headers=bob),
    ]
    assert [reply.status_code for reply in replies] == [404] * 6
    output = server.get(path, headers=alice).json()["output"][0]["id"]
    reference = {**body, "input": [{"type": "item_reference", "id": output}]}
    assert server.post("/v1/responses", reference, headers=bob).status_code == 404
    assert server.post("/v1/responses", reference, headers=alice).status_code == 200
    assert server.get(path).status_code == 401


def test_background_responses_are_followed_and_cancelled(harness: Harness) -> None:
    """One that runs shows its state, gives its events from any place on, and ends when it is cancelled."""
    harness.engine.hold.clear()
    found = ask(harness, background=True)
    assert found["status"] == "queued"
    path = f"/v1/responses/{found['id']}"
    assert harness.get(path).json()["status"] in ("queued", "in_progress")
    assert refused(harness, previous_response_id=found["id"])["param"] == "previous_response_id"
    harness.engine.hold.set()
    events = response_events(harness.get(path, params={"stream": "true"}))
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert "".join(item["text"] for item in fold_response(events)) == "Hello, world"
    rest = harness.get(path, params={"stream": "true", "starting_after": 4})
    assert rest.text.count("event: ") == len(events) - 5
    assert '"sequence_number":5' in rest.text.split("\n\n")[0]
    assert harness.get(path).json()["status"] == "completed"
    assert harness.post(f"{path}/cancel").json()["status"] == "completed"
    harness.engine.hold.clear()
    second = ask(harness, background=True)
    cancelled = harness.post(f"/v1/responses/{second['id']}/cancel")
    assert strict_response(cancelled.json())["status"] == "cancelled"
    assert harness.get(f"/v1/responses/{second['id']}").json()["status"] == "cancelled"
    harness.eventually(lambda: harness.state.num_live == 0)
    harness.engine.hold.set()
    third = ask(harness)
    assert harness.post(f"/v1/responses/{third['id']}/cancel").status_code == 400
    assert harness.get(f"/v1/responses/{third['id']}", params={"stream": "true"}).status_code == 400


def test_a_background_stream_outlives_its_reader(harness: Harness) -> None:
    """With `background` and `stream`, the response goes on when the client leaves."""
    harness.engine.delay_s = 0.02
    body = {"model": "tiny", "input": "hi", "background": True, "stream": True}
    reply = harness.http.post(f"{harness.base}/v1/responses", json=body, stream=True, timeout=60)
    first = next(line for line in reply.iter_lines() if line.startswith(b"data: "))
    reply.close()
    path = f"/v1/responses/{json.loads(first[6:])['response']['id']}"
    harness.eventually(lambda: harness.get(path).json()["status"] == "completed")
    assert text_of(harness.get(path).json()["output"][0]) == "Hello, world"


def test_a_background_response_that_fails_says_why(harness: Harness) -> None:
    """The engine's death is a failed response with an error, not a lost one."""
    harness.engine.die_after = 2
    found = ask(harness, background=True)
    path = f"/v1/responses/{found['id']}"
    harness.eventually(lambda: harness.get(path).json()["status"] == "failed")
    assert harness.get(path).json()["error"]["code"] == "server_error"


def test_one_owners_background_responses_do_not_drop_the_events_of_anothers() -> None:
    """Of many that have ended the oldest of whoever has most go, by bytes; and in time all do."""
    background = BackgroundResponses(Supervisor())

    def ended(owner: str, name: str, num_bytes: int = 0) -> None:
        live = background._live[name] = LiveResponse(owner, None, SimpleNamespace(), num_bytes=num_bytes)  # type: ignore[arg-type]
        live.is_ended, live.ended_at = True, time.monotonic()

    ended("b", "first")
    for i in range(1000):
        ended("a", f"small-{i}")
    background.forget()
    assert {"first", "small-999"} < background.ids()
    assert len(background.ids()) == MAX_LOG_BYTES // LOG_BYTES
    for i in range(9):
        ended("a", f"large-{i}", MAX_LOG_BYTES // 3)
    background.forget()
    assert background.ids() == {"first", "large-7", "large-8"}
    for live in background._live.values():
        live.ended_at -= LOG_S
    background.forget()
    assert not background.ids()


def test_an_aborted_background_response_failed(harness: Harness) -> None:
    """`/abort_request` ends it by its id, which is not the prompt's fault."""
    harness.engine.hold.clear()
    found = ask(harness, background=True)
    harness.eventually(lambda: found["id"] in harness.engine.live)
    assert harness.post("/abort_request", {"rid": found["id"]}).json() == {"aborted": 1}
    path = f"/v1/responses/{found['id']}"
    harness.eventually(lambda: harness.get(path).json()["status"] == "failed")
    assert harness.get(path).json()["error"] == {"code": "server_error", "message": "the request was aborted"}
