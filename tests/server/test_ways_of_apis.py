"""A package's API takes every way that the built-in ones take: keys, limits, batches, a gateway, Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import acme_api
import pytest
import requests
from gateway_process import ADMIN, KEY, RESUME, Served

from dovetail_server.tenants.keys_file import key_hash

ASK = "What is the capital of France?"
SLOW, TIGHT, BOSS = "sk-slow", "sk-tight", "sk-boss"
SAY, COLD = "/acme/say", {"heat": 0, "most": 30}
SERVED = ("--apis", "openai,acme", "--num-threads", "1", "--device", "cpu")
LARGE = ASK + " word" * 20_000
IN_THREAD = {
    "messages": [{"role": "user", "content": ASK}],
    "max_tokens": 1,
    "response_format": {"type": "json_object"},
}
"""What makes the server prepare a request in a thread."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The package, for processes that start here."""
    added = acme_api.install(tmp_path_factory.mktemp("site"))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (added, before)))
    yield added
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def served(installed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    keys = [
        {"name": "slow", "hash": f"sha256:{key_hash(SLOW)}"},
        {"name": "tight", "hash": f"sha256:{key_hash(TIGHT)}", "limits": {"input_tokens_per_minute": 40}},
        {"name": "boss", "hash": f"sha256:{key_hash(BOSS)}", "roles": ["admin", "user"]},
    ]
    file = folder / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    flags = ("--keys-file", str(file), "--file-storage-path", str(folder / "files"), "--min-free-disk-bytes", "0")
    running = Served(folder, "serve", *SERVED, *flags, "--log-requests", key=SLOW)
    try:
        yield running.wait()
    finally:
        running.close()


def lines_of(reply: requests.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in reply.content.splitlines()]


def test_it_answers_whole_and_as_a_stream(served: Served) -> None:
    """The stream's texts are the whole reply's, and both count the same tokens."""
    whole = served.post(SAY, {"ask": ASK, **COLD})
    assert whole.headers["content-type"] == "application/json"
    *said, last = lines_of(served.post(SAY, {"ask": ASK, "flow": True, **COLD}))
    assert "".join(line["said"] for line in said) == whole.json()["said"]
    assert {**last, "said": whole.json()["said"]} == {**whole.json(), "over": True}
    assert last["wrote"] > 1
    assert served.get("/acme/show").json() == {"models": ["dovetail-demo"]}


def test_a_large_body_is_read_in_another_process(served: Served) -> None:
    """Its refusal speaks of the API's own fields, as that of a small one."""
    for ask in (ASK, LARGE):
        refused = served.post(SAY, {"ask": ask, "heat": -1})
        assert (refused.status_code, refused.json()["at"]) == (400, "heat")
    too_long = served.post(SAY, {"ask": LARGE})
    assert (too_long.status_code, too_long.json()["at"]) == (400, "ask")


@pytest.mark.parametrize("stall", ["slow", "sleep", "match", "loop"])
def test_a_slow_read_stops_no_other_route(served: Served, stall: str) -> None:
    """It goes on in another process, and is ended after its time by an error that names the package."""
    meanwhile = 0
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(served.post, SAY, {"ask": ASK, "stall": stall, **COLD})
        while not slow.done():
            assert served.get("/livez").status_code == 200
            meanwhile += not slow.done()
            time.sleep(0.05)
    assert meanwhile > 1 or stall == "slow"
    reply = slow.result()
    if stall == "slow":
        assert "Paris" in reply.json()["said"]
    else:
        assert (reply.status_code, reply.json()["code"]) == (500, "plugin_failed")
        assert reply.json()["oops"].startswith("api 'acme' of acme ")
        assert "/acme/say: read() did not end within 3 s and was ended" in reply.json()["oops"]
    assert served.post(SAY, {"ask": ASK, **COLD}).status_code == 200


def test_a_view_that_sleeps_holds_nobody_up(served: Served) -> None:
    """Not as often as the server has threads for files, batches and long prompts; the error names the package."""
    with ThreadPoolExecutor(12) as pool:
        slow = [pool.submit(served.post, "/acme/ask", {"stall": "sleep"}) for _ in range(12)]
        assert served.get("/livez").status_code == 200
        assert served.post("/v1/chat/completions", IN_THREAD).status_code == 200
        assert not all(reply.done() for reply in slow)
        for reply in (each.result() for each in slow):
            assert (reply.status_code, reply.json()["code"]) == (500, "plugin_failed")
            assert "/acme/ask: show() did not end within 3 s" in reply.json()["oops"]
    assert served.get("/acme/show").status_code == 200
    assert served.post("/acme/ask", {"stall": "sleep"}).status_code == 500


def test_a_key_is_asked_for_in_its_words(served: Served) -> None:
    """Without one it is 401, and the error has the API's form and the request's identifier."""
    for path in (SAY, "/acme/nothing"):
        reply = requests.post(served.base + path, json={"ask": ASK}, timeout=60)
        assert (reply.status_code, reply.json()["code"]) == (401, "invalid_api_key")
        assert reply.json()["id"] == reply.headers["x-request-id"]


def test_limits_of_a_key_hold_and_its_use_is_counted(served: Served) -> None:
    """Beyond them it is 429 with a time to wait, in the API's words; what was rejected is counted, too."""
    tight = {"authorization": f"Bearer {TIGHT}"}

    def usage() -> dict[str, Any]:
        found: dict[str, Any] = served.get("/v1/usage", headers=tight).json()["data"][0]
        return found

    statuses = []
    for _ in range(6):
        reply = served.post(SAY, {"ask": ASK, **COLD}, headers=tight)
        statuses.append(reply.status_code)
        if reply.status_code == 429:
            assert reply.json().keys() == {"oops", "at", "code", "id"}
            assert int(reply.headers["retry-after"]) >= 1
    num_done = statuses.count(200)
    assert statuses == [200] * num_done + [429] * (6 - num_done)
    assert 0 < num_done < 6
    assert usage()["requests"] == num_done
    assert usage()["output_tokens"] > 0
    assert sum(usage()["rejected"].values()) == 6 - num_done


def test_metrics_and_logs_name_the_route(served: Served) -> None:
    """Requests are counted by route and status, and each has its lines in the log."""
    assert served.post(SAY, {"ask": ASK, **COLD}).status_code == 200
    boss = {"authorization": f"Bearer {BOSS}"}
    counted = 'dovetail_http_requests_total{method="POST",route="/acme/say",status="200"'
    served.until(lambda: counted in served.get("/metrics", headers=boss).text)  # the reply does not wait for it
    served.until(lambda: f"POST {SAY}" in served.text() and "prompt tokens, 1 choices" in served.text())


def batch_lines() -> list[dict[str, Any]]:
    bodies = [{"ask": ASK, **COLD}, {"ask": LARGE, **COLD}, {"ask": ASK, "heat": -1}, {"ask": ASK, "flow": True}]
    return [{"custom_id": f"{n}", "method": "POST", "url": SAY, "body": body} for n, body in enumerate(bodies)]


def check_lines(results: dict[str, dict[str, Any]]) -> None:
    """Hold the results of `batch_lines` against what they are."""
    assert results["0"]["response"]["status_code"] == 200
    assert "Paris" in results["0"]["response"]["body"]["said"]
    refused = {name: results[name]["response"] for name in "123"}
    assert {reply["status_code"] for reply in refused.values()} == {400}
    assert {name: reply["body"]["at"] for name, reply in refused.items()} == {"1": "ask", "2": "heat", "3": "stream"}
    assert refused["1"]["body"].keys() == {"oops", "at", "code", "id"}


def finished(served: Served, data: bytes, endpoint: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a batch, and return it with its rows."""
    sent = {"file": ("in.jsonl", data)}
    file = served.session.post(served.base + "/v1/files", files=sent, data={"purpose": "batch"}, timeout=60).json()
    made = served.post("/v1/batches", {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"})
    assert made.status_code == 200, made.text
    batch = made.json()
    deadline = time.monotonic() + 60
    while batch["status"] != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
        batch = served.get(f"/v1/batches/{batch['id']}").json()
    files = [batch[name] for name in ("output_file_id", "error_file_id") if batch.get(name)]
    return batch, [row for name in files for row in lines_of(served.get(f"/v1/files/{name}/content"))]


def test_a_batch_is_told_that_a_route_only_streams(served: Served) -> None:
    """Of a route that does not say so: each line fails by the route's name, and nothing waits."""
    line = {"custom_id": "0", "method": "POST", "url": "/acme/pour", "body": {"ask": ASK, **COLD}}
    batch, rows = finished(served, json.dumps(line).encode(), "/acme/pour")
    assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    assert rows[0]["response"]["status_code"] == 400
    assert "/acme/pour answers it with a stream" in rows[0]["response"]["body"]["oops"]
    assert lines_of(served.post("/acme/pour", {"ask": ASK, **COLD}))[-1]["over"]


def test_a_batch_runs_it(served: Served) -> None:
    """Of files: small and large lines, refusals of a line in the API's fields; tokens are summed up."""
    data = "".join(json.dumps(line) + "\n" for line in batch_lines()).encode()
    batch, rows = finished(served, data, SAY)
    results = {row["custom_id"]: row for row in rows}
    check_lines(results)
    body = results["0"]["response"]["body"]
    assert (batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]) == (body["read"], body["wrote"])
    assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
    file = batch["input_file_id"]
    unknown = served.post("/v1/batches", {"input_file_id": file, "endpoint": "/x", "completion_window": "24h"})
    assert SAY in unknown.json()["error"]["message"]
    flows = {"input_file_id": file, "endpoint": "/acme/flow", "completion_window": "24h"}
    refused = served.post("/v1/batches", flows)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "endpoint")
    assert SAY in refused.json()["error"]["message"]
    assert lines_of(served.post("/acme/flow", {"ask": ASK, **COLD}))[-1]["over"]


def run_batch(folder: Path, *flags: str) -> None:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in batch_lines()))
    command = [sys.executable, "-m", "dovetail_server", "run-batch", "-i", str(source), "-o", str(target)]
    ended = subprocess.run([*command, *SERVED, *flags], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1, ended.stderr[-3000:]  # some are refused
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == ["0", "1", "2", "3"]
    check_lines({row["custom_id"]: row for row in rows})


@pytest.mark.full
def test_run_batch_runs_it(installed: str, tmp_path: Path) -> None:
    """Without a server; results are in the order of the input."""
    run_batch(tmp_path)


@pytest.mark.full
def test_run_batch_on_ray_runs_it(installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In actors of a cluster."""
    pytest.importorskip("ray", reason="needs dovetail-llm[ray]")
    from ray_process import QUIET

    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    run_batch(tmp_path, "--ray", "--replicas", "1")


@pytest.mark.full
def test_ray_serves_it(installed: str, tmp_path: Path) -> None:
    """Whole, as a stream of a replica that is killed, with keys, views and refusals in the API's words."""
    pytest.importorskip("ray", reason="needs dovetail-llm[ray]")
    from ray_process import RayServed

    flags: dict[str, Any] = {"apis": ["openai", "acme"], "device": "cpu", "num_cpus": 0.5, "api_key": [KEY]}
    flags["batch_invariant"] = True  # what another replica goes on with is computed as a prompt
    running = RayServed(tmp_path, file_storage_path=str(tmp_path / "files"), **flags)
    headers = {"authorization": f"Bearer {KEY}"}
    story = {"ask": "Tell me a long story.", "flow": True, "heat": 0, "most": 600}
    try:
        running.wait()
        assert running.post(SAY, {"ask": ASK}).json().keys() == {"oops", "at", "code", "id"}
        whole = running.post(SAY, {"ask": ASK, **COLD}, headers=headers)
        assert "Paris" in whole.json()["said"]
        assert running.get("/acme/show", headers=headers).json() == {"models": ["dovetail-demo"]}
        refused = running.post(SAY, {"ask": ASK, "heat": -1}, headers=headers)
        assert (refused.status_code, refused.json()["at"]) == (400, "heat")
        expected = text_of(lines_of(running.post(SAY, story, headers=headers)))
        lines = []
        with running.post(SAY, story, headers=headers, stream=True) as reply:
            for raw in reply.iter_lines():
                if len(lines) == 1:
                    [pid] = running.replicas()
                    os.kill(pid, signal.SIGKILL)
                lines.append(json.loads(raw))
        assert text_of(lines) == expected
        assert len(lines) > 3
    finally:
        running.close()


@pytest.fixture(scope="module")
def fleet(installed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("smg", reason="needs dovetail-llm[gateway]")
    folder = tmp_path_factory.mktemp("fleet")
    flags = ("--data-parallel-size", "2", "--api-key", KEY, "--admin-api-key", ADMIN, "--resume-key", RESUME)
    flags += ("--grammar-backend", "none", "--body-processes", "0")  # which the other server has
    running = Served(folder, "serve", *SERVED, *flags, "--file-storage-path", str(folder / "files"))
    try:
        yield running.wait()
    finally:
        running.close()


def flowing(fleet: Served, begun: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Return the lines of a long stream, and call `begun` behind its first."""
    body = {"ask": "Tell me a long story.", "flow": True, "heat": 0, "most": 1500}
    lines = []
    with fleet.post(SAY, body, stream=True) as reply:
        assert reply.status_code == 200
        for raw in reply.iter_lines():
            if not lines:
                begun()
            lines.append(json.loads(raw))
    return lines


def text_of(lines: list[dict[str, Any]]) -> str:
    assert lines[-1].get("over"), lines[-1]
    return "".join(line.get("said", "") for line in lines)


def test_a_gateway_places_it(fleet: Served) -> None:
    """By its prompt's beginning where the route says so, and anywhere else; views, errors and whole replies as well."""
    before = fleet.num_placed()
    whole = fleet.post(SAY, {"ask": ASK, **COLD})
    assert "Paris" in whole.json()["said"]
    assert fleet.num_placed() == before + 1
    assert fleet.post("/acme/tell", {"ask": ASK, **COLD}).json()["said"] == whole.json()["said"]
    assert fleet.num_placed() == before + 1
    assert fleet.get("/acme/show").json() == {"models": ["dovetail-demo"]}
    assert lines_of(fleet.post("/acme/pour", {"ask": ASK, **COLD}))[-1]["over"]
    assert fleet.post("/acme/ask", {"stall": "sleep"}).json()["code"] == "plugin_failed"
    refused = fleet.post(SAY, {"ask": ASK, "heat": -1})
    assert (refused.status_code, refused.json()["at"]) == (400, "heat")
    assert requests.post(fleet.base + SAY, json={"ask": ASK}, timeout=60).json().keys() == {"oops", "at", "code", "id"}


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_gateway_has_another_worker_go_on(fleet: Served, is_whole: bool) -> None:
    """A worker is killed while it answers: the stream says what it would have said, and a whole reply comes."""
    fleet.until(lambda: all(worker["ready"] for worker in fleet.workers(ADMIN)))
    expected = text_of(flowing(fleet))
    kill_the_busiest = partial(fleet.kill_the_busiest, fleet.pids())
    if is_whole:
        timer = threading.Timer(0.3, kill_the_busiest)
        timer.start()
        reply = fleet.post(SAY, {"ask": "Tell me a long story.", "heat": 0, "most": 1500})
        timer.join()
        assert (reply.status_code, reply.json()["said"]) == (200, expected)
    else:
        lines = flowing(fleet, kill_the_busiest)
        assert text_of(lines) == expected
        assert len(lines) > 3
        assert " to DP" in fleet.text()
    fleet.until(lambda: all(worker["ready"] for worker in fleet.workers(ADMIN)))
