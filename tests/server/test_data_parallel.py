"""`dovetail serve --data-parallel-size 2` and `dovetail gateway`, with smg and workers that serve the demo model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from gateway_process import ADMIN, KEY, OTHER, RESUME, Served, chat
from spelled import ask, spellings, websocket

pytest.importorskip("smg", reason="needs dovetail-llm[gateway]")

GROUPS, PER_GROUP, IN_FLIGHT = 13, 5, 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    flags = ["--data-parallel-size", "2", "--device", "cpu", "--file-storage-path", str(folder / "files")]
    flags += ["--api-key", f"{KEY},{OTHER}", "--admin-api-key", ADMIN, "--drain-timeout", "20", "--drain-grace", "1"]
    running = Served(folder, "serve", *flags, "--random-seed", "3", "--resume-key", RESUME)
    try:
        yield running.wait()
    finally:
        running.close()


def test_prefixes_are_found_by_who_has_them_cached(served: Served) -> None:
    """65 of 65 requests in 13 groups, at a hit rate of 0.74 of at best 0.77; both workers serve, placed by smg."""
    names = ("dovetail_cached_prompt_tokens_total", "dovetail_prompt_tokens_total")
    order = [(group, member) for member in range(PER_GROUP) for group in range(GROUPS)]
    assert served.post("/flush_cache", {}, headers={"authorization": f"Bearer {ADMIN}"}).status_code == 200
    before, num_placed = [served.count(name) for name in names], served.num_placed()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        replies = list(pool.map(lambda at: served.post("/v1/chat/completions", chat(*at)), order))
    assert [reply.status_code for reply in replies] == [200] * len(order)
    usage = [reply.json()["usage"] for reply in replies]
    found = [
        sum(use["prompt_tokens_details"]["cached_tokens"] for use in usage),
        sum(u["prompt_tokens"] for u in usage),
    ]
    print(f"prefix hit {found[0] / found[1]:.3f}")
    assert found[0] / found[1] >= 0.74

    def counted() -> list[dict[str, float]]:
        return [{n: b[n] - a.get(n, 0) for n in b} for a, b in zip(before, map(served.count, names), strict=True)]

    # An engine tells its counters now and then, a request's last ones maybe after its reply.
    served.until(lambda: [sum(each.values()) for each in counted()] == found)
    assert min(counted()[1].values()) > 0
    unplaced = [line for line in served.text().splitlines() if "smg chose no worker" in line]
    assert served.num_placed() - num_placed >= 0.9 * len(order), unplaced


def test_every_api_gets_through(served: Served) -> None:
    """Chat, streams, tools, completions, responses that are kept, messages, the native route, tokens, embeddings."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    for path, body in {
        "/v1/chat/completions": {"messages": question, "tools": [tool], "tool_choice": "required", "max_tokens": 64},
        "/v1/completions": {"prompt": "The capital of", "max_tokens": 4},
        "/generate": {"text": "The capital of", "sampling_params": {"max_new_tokens": 4}},
        "/v1/messages": {"model": "dovetail-demo", "messages": question, "max_tokens": 8},
        "/tokenize": {"prompt": "hi"},
        "/v1/embeddings": {"input": "hi"},
    }.items():
        reply = served.post(path, body)
        assert reply.status_code == 200, (path, reply.text)
    kept = served.post("/v1/responses", {"input": "hi", "max_output_tokens": 8}).json()["id"]
    assert served.get(f"/v1/responses/{kept}").json()["status"] in ("completed", "incomplete")
    with served.post("/v1/chat/completions", {"messages": question, "stream": True}, stream=True) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == b"data: [DONE]"
    told = "".join(c["delta"].get("content") or "" for line in lines[:-1] for c in json.loads(line[6:])["choices"])
    assert "Paris" in told
    going = served.post("/v1/responses", {"input": "Count to a hundred.", "background": True}).json()["id"]
    assert served.post(f"/v1/responses/{going}/cancel", {}).json()["status"] in ("cancelled", "completed")


def test_errors_are_those_of_a_server(served: Served) -> None:
    """Of a worker, word for word, and of this process; a request's identifier comes back."""
    reply = served.post("/v1/chat/completions", {"messages": []}, headers={"x-request-id": "mine"})
    assert (reply.status_code, reply.headers["x-request-id"]) == (400, "mine")
    assert reply.json()["error"]["param"] == "messages"
    reply = served.post("/v1/chat/completions", {"messages": "hi", "nonsense": 1})
    assert reply.status_code == 400
    assert served.session.post(f"{served.base}/v1/chat/completions", data=b"{", timeout=60).status_code == 415
    assert served.get("/v1/nothing").json()["error"]["code"] == "not_found"
    big = {"messages": [{"role": "user", "content": "x" * (33 << 20)}]}
    assert served.post("/v1/chat/completions", big).json()["error"]["code"] == "body_too_large"
    assert served.get("/v1/models/with%20space%2Fslash").status_code == 404


def test_keys_are_asked_for_as_by_any_server(served: Served) -> None:
    """Nothing passes without one; a user's does not open admin routes; probes are open."""
    for path in ("/v1/models", "/v1/workers", "/metrics", "/v1/files", "/server_info", "/nothing"):
        assert requests.get(served.base + path, timeout=30).status_code == 401, path
    assert requests.post(f"{served.base}/v1/chat/completions", json=chat(0, 0), timeout=30).status_code == 401
    assert requests.get(f"{served.base}/v1/models", headers={"x-api-key": OTHER}, timeout=30).status_code == 200
    assert served.post("/flush_cache", {}).status_code == 403
    assert requests.get(f"{served.base}/readyz", timeout=30).json() == {"status": "ok"}


def test_addresses_are_read_before_keys_and_placing(served: Served) -> None:
    """As a server does: what is meant is served and placed, a deployment is checked, no spelling opens a command."""
    port, body = int(served.base.rpartition(":")[2]), chat(0, 0)
    num_placed = served.num_placed()
    for path in ("/chat/completions", "//v1/v1/chat/completions", "/openai/deployments/dovetail-demo/chat/completions"):
        assert ask(port, "POST", path, body)[0] == 401, path
        status, _, reply = ask(port, "POST", path, body, api_key=KEY)
        assert (status, json.loads(reply)["object"]) == (200, "chat.completion"), path
    assert served.num_placed() == num_placed + 3
    status, _, reply = ask(port, "POST", "/openai/deployments/other/chat/completions?api-version=1", body, api_key=KEY)
    assert (status, json.loads(reply)["error"]["code"]) == (404, "model_not_found")
    assert ask(port, "GET", "/models", api_key=KEY)[0] == 200
    status, headers, reply = ask(port, "HEAD", "//v1/models", api_key=KEY)
    assert (status, reply, int(headers["content-length"]) > 0) == (200, b"", True)
    for path in ("/flush_cache", "/abort_request", "/start_profile", "/v1/workers", "/metrics"):
        for spelled in spellings(path):
            assert ask(port, "POST", spelled, {"abort_all": True})[0] in (400, 401, 404, 405), spelled
            assert ask(port, "POST", spelled, {"abort_all": True}, api_key=KEY)[0] in (307, 400, 403, 404, 405), spelled
    assert ask(port, "POST", "/%66lush_cache", {}, api_key=ADMIN)[0] == 200
    status, error = websocket(port, "/v1/responses", **{"api-key": KEY})
    assert (status, error["code"]) == (404, "websocket_not_served")
    assert "a gateway does not" in error["message"]
    question = {"origin": "https://app.example", "access-control-request-method": "POST"}
    assert b"--allow-origins" in ask(port, "OPTIONS", "/v1/models", **question)[2]


def test_files_and_batches_are_on_one_database(served: Served) -> None:
    """A file is uploaded once, its batch is done whichever worker runs it, and stays its owner's."""
    url = "/v1/chat/completions"
    lines = [{"custom_id": f"n{i}", "method": "POST", "url": url, "body": chat(i, i)} for i in range(9)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    upload = served.session.post(
        f"{served.base}/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}, timeout=60
    )
    file = upload.json()["id"]
    wish = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = served.post("/v1/batches", wish).json()["id"]
    served.until(lambda: served.get(f"/v1/batches/{batch}").json()["status"] == "completed")
    output = served.get(f"/v1/batches/{batch}").json()["output_file_id"]
    text = served.get(f"/v1/files/{output}/content").text
    assert sorted(json.loads(line)["custom_id"] for line in text.splitlines()) == [f"n{i}" for i in range(9)]
    assert served.get(f"/v1/files/{file}/content").content == data
    theirs = {"authorization": f"Bearer {OTHER}"}
    assert served.get(f"/v1/files/{file}", headers=theirs).status_code == 404


def test_one_log_names_the_workers(served: Served) -> None:
    """One address is announced, and every line of a worker bears its name."""
    text = served.text()
    assert text.count("fired up") == 1
    assert " DP0] " in text
    assert " DP1] " in text
    assert KEY not in text
    shown = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout
    owned = [line for line in shown.splitlines() if "cli.parent_bound" in line or "smg" in line]
    assert len(owned) >= 3
    assert not any(KEY in line or "api" in line for line in owned)


def test_a_worker_that_dies_is_found_and_started_again(served: Served) -> None:
    """Meanwhile the other one serves; health says so, and requests do not fail."""
    pid = served.pids()[1]
    os.kill(pid, signal.SIGKILL)
    statuses = [served.post("/v1/chat/completions", chat(20, n)).status_code for n in range(12)]
    assert statuses == [200] * 12
    assert served.get("/readyz").status_code == 200
    served.until(lambda: all(worker["ready"] for worker in served.workers()) and pid not in served.pids())
    assert "Worker DP1 ended by signal 9; it is started again." in served.text()


def test_smg_that_dies_is_started_again(served: Served) -> None:
    """Requests go on meanwhile, and are placed by it afterwards."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in found.splitlines()]
    [smg] = [int(pid) for pid, parent, args in rows if int(parent) == served.process.pid and "parent_bound" not in args
             and "smg" in args]  # fmt: skip
    os.kill(smg, signal.SIGKILL)
    assert [served.post("/v1/chat/completions", chat(30, n)).status_code for n in range(4)] == [200] * 4

    before = served.num_placed()
    served.until(lambda: served.post("/v1/chat/completions", chat(31, 0)).ok and served.num_placed() > before)


def test_processes_end_with_the_gateway(tmp_path: Path, light: None) -> None:
    """Workers and smg, though it is killed and can tell nobody."""
    running = Served(tmp_path, "serve", "--dp", "2", "--device", "cpu", "--file-storage-path", str(tmp_path), key=None)
    try:
        running.wait()
        found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        children = [int(p) for p, parent in map(str.split, found.splitlines()) if int(parent) == running.process.pid]
        assert len(children) >= 3
    finally:
        running.process.kill()
        running.process.wait()
    deadline = time.monotonic() + 120
    while any(is_running(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dp", "2", "--tp", "3", "--num-threads", "1"], "cores are here|3"),
        pytest.param(["--dp", "999"], "--data-parallel-size '999'", marks=pytest.mark.full),
        pytest.param(
            ["--dp", "2", "--device", "cpu", "--context-length", "9999999"], "the model has", marks=pytest.mark.full
        ),
        (["--dp", "2", "--device", "cpu", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_what_workers_refuse_is_said_once(flags: list[str], said: str, tmp_path: Path, light: None) -> None:
    """In one line, with exit code 2, before anything is served."""
    running = Served(tmp_path, "serve", *flags, "--file-storage-path", str(tmp_path / "files"))
    assert running.process.wait(90) == 2
    errors = [line for line in running.text().splitlines() if "error: " in line]
    assert len(errors) == 1, running.text()
    assert re.search(said, errors[0])


class Stranger(BaseHTTPRequestHandler):
    """A worker of another version."""

    version = "0.0.1"

    def do_GET(self) -> None:
        body = {"/readyz": {"status": "ok"}, "/version": {"version": self.version}}.get(self.path, {})
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def test_a_worker_of_another_version_is_refused(tmp_path: Path) -> None:
    """At the start, by its address, both versions, and what to do."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        running = Served(tmp_path, "gateway", "--worker", url)
        assert running.process.wait(60) == 2
    finally:
        server.shutdown()
        server.server_close()
    [error] = [line for line in running.text().splitlines() if "error: " in line and "gateway" in line]
    assert f"--worker {url}: it is Dovetail 0.0.1, and this gateway" in error
    assert "run one version on all hosts" in error


def test_a_gateway_says_whom_it_waits_for(tmp_path: Path) -> None:
    """Where nobody answers at the start: the address and why, once."""
    running = Served(tmp_path, "gateway", "--worker", "http://127.0.0.1:9")
    try:
        running.until(lambda: "Waiting for worker" in running.text())
        assert "at http://127.0.0.1:9: cannot be reached" in running.text()
        time.sleep(1)
        assert running.text().count("Waiting for worker") == 1
    finally:
        running.close()


def test_a_gateway_stands_before_servers_of_other_hosts(served: Served, tmp_path: Path) -> None:
    """Here those of another gateway; one that is not there is left out, and a wrong key is said at the start."""
    assert not any("url" in worker for worker in served.workers())  # for admins only
    urls = [worker["url"] for worker in served.workers(ADMIN)]
    named = [flag for url in [*urls, "http://127.0.0.1:9"] for flag in ("--worker", url)]
    running = Served(tmp_path, "gateway", *named, "--api-key", KEY)
    try:
        running.wait()
        served.until(lambda: [worker["ready"] for worker in running.workers()] == [True, True, False])
        assert "cannot be reached" in running.workers()[2]["reason"]
        replies = [running.post("/v1/chat/completions", chat(40, n)) for n in range(4)]
        assert [reply.status_code for reply in replies] == [200] * 4
    finally:
        assert running.close() == 0
    wrong = Served(tmp_path, "gateway", *named, "--api-key", "unknown-key")
    assert wrong.process.wait(60) == 2
    assert "does not take this gateway's key; give both the same --api-key" in wrong.text()
