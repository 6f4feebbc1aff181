"""`serve run dovetail.ray:app`: the demo model under Ray Serve, on a cluster of this machine alone."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from gateway_process import chat
from ray_process import LIMIT_S, RayServed

pytest.importorskip("ray", reason="needs dovetail-llm[ray]")
pytestmark = pytest.mark.timeout(900)

KEY, OTHER = "first-key", "second-key"
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, light_servers: dict[str, str]) -> Iterator[RayServed]:
    folder = tmp_path_factory.mktemp("ray")
    scaling = {"upscale_delay_s": 0, "downscale_delay_s": 5, "look_back_period_s": 11, "target_queued_tokens": 600}
    running = RayServed(
        folder,
        api_key=[KEY, OTHER],
        device="cpu",
        max_replicas=2,
        num_cpus=0.5,
        max_total_tokens=65536,
        file_storage_path=str(folder / "files"),
        random_seed=3,
        batch_invariant=True,  # another replica goes on in other company: near ties must not tell
        **scaling,
    )
    try:
        yield running.wait()
    finally:
        running.close()


def story(number: int, tokens: int = 100) -> dict[str, Any]:
    draws = {"temperature": 0.9, "seed": number, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return {"messages": [{"role": "user", "content": f"Tell me the story number {number}."}], **draws}


def told(served: RayServed, body: dict[str, Any], begun: Callable[[], None] = lambda: None) -> str:
    """Return a stream's text, and call `begun` behind its first; what is no whole stream says why."""
    events, text = [b""], ""
    with served.post("/v1/chat/completions", body, headers=HEADERS, stream=True) as reply:
        for line in reply.iter_lines():
            if not line or line.startswith(b":"):
                continue
            events.append(line)
            if reply.status_code == 200 and line.startswith(b"data: {"):
                deltas = [choice["delta"] for choice in json.loads(line[6:]).get("choices", ())]
                said = "".join(delta.get("content") or delta.get("reasoning") or "" for delta in deltas)
                if said and not text:
                    begun()
                text += said
    if reply.status_code != 200 or events[-1] != b"data: [DONE]" or b"event: error" in events:
        return f"broken: {reply.status_code} {events[-2:]}"
    return text


def test_it_is_a_server(served: RayServed) -> None:
    """Every API gets through, errors are those of a server, and a request's identifier comes back once."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    for path, body in {
        "/v1/chat/completions": {"messages": question, "max_tokens": 16},
        "/v1/completions": {"prompt": "The capital of", "max_tokens": 4},
        "/generate": {"text": "The capital of", "sampling_params": {"max_new_tokens": 4}},
        "/v1/messages": {"model": "dovetail-demo", "messages": question, "max_tokens": 8},
        "/v1/responses": {"input": "hi", "max_output_tokens": 8},
        "/tokenize": {"prompt": "hi"},
        "/v1/embeddings": {"input": "hi"},
    }.items():
        reply = served.post(path, body, headers=HEADERS)
        assert reply.status_code == 200, (path, reply.text)
    reply = served.post("/v1/chat/completions", {"messages": []}, headers={**HEADERS, "x-request-id": "mine"})
    assert (reply.status_code, reply.headers["x-request-id"]) == (400, "mine")
    assert reply.json()["error"]["param"] == "messages"
    assert served.post("/v1/chat/completions", {"messages": question, "model": "x"}, headers=HEADERS).status_code == 404
    assert served.get("/v1/models", headers=HEADERS).json()["data"][0]["id"] == "dovetail-demo"
    for path in ("/metrics", "/flush_cache", "/v1/resume"):
        assert served.get(path, headers=HEADERS).json()["error"]["code"] == "unsupported_route", path
    assert "Paris" in told(served, {"messages": question, "stream": True})


def test_keys_are_asked_for(served: RayServed) -> None:
    """Nothing passes without one but the probes; files stay their owner's."""
    assert served.get("/readyz").json() == {"status": "ok"}
    for path in ("/v1/models", "/v1/files", "/nothing"):
        assert served.get(path).status_code == 401, path
    assert served.post("/v1/completions", {"prompt": "x"}).status_code == 401
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}
    upload = requests.post(
        f"{served.base}/v1/files",
        files={"file": ("in.jsonl", json.dumps(line).encode())},
        data={"purpose": "batch"},
        headers=HEADERS,
        timeout=LIMIT_S,
    )
    file = upload.json()["id"]
    assert served.get(f"/v1/files/{file}", headers={"authorization": f"Bearer {OTHER}"}).status_code == 404
    wish = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = served.post("/v1/batches", wish, headers=HEADERS).json()["id"]
    served.until(lambda: served.get(f"/v1/batches/{batch}", headers=HEADERS).json()["status"] == "completed")


def test_a_client_that_leaves_ends_its_request(served: RayServed) -> None:
    """Its identifier is free again: the engine works on nothing that nobody reads."""
    body = {**story(1, tokens=1500), "rid": "left"}
    with served.post("/v1/chat/completions", body, headers=HEADERS, stream=True) as r:
        assert r.status_code == 200
        next(r.iter_content(1))
    ended = time.monotonic() + LIMIT_S
    while (
        reply := served.post("/v1/chat/completions", {**story(1, 2), "rid": "left"}, headers=HEADERS)
    ).status_code != 200:
        assert (reply.json()["error"]["code"], time.monotonic() < ended) == ("duplicate_rid", True)
        time.sleep(0.1)


class Load:
    """Requests without end, so many at a time, until it is stopped."""

    def __init__(self, served: RayServed) -> None:
        self.served = served
        self.width = 0
        self.failed: list[str] = []
        self.num_done = 0
        self._number = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def widen(self, width: int) -> None:
        self.width = width
        while len(self._threads) < width:
            thread = threading.Thread(target=self._run, args=(len(self._threads),))
            self._threads.append(thread)
            thread.start()

    def _run(self, place: int) -> None:
        while place < self.width:
            with self._lock:
                self._number += 1
                number = self._number
            text = told(
                self.served, {**chat(number % 13, number), "stream": True, "max_tokens": 40, "ignore_eos": True}
            )
            with self._lock:
                self.num_done += 1
                if text.startswith("broken"):
                    self.failed.append(text)
            if self.width == 1:
                time.sleep(0.3)  # for one replica to be enough it has to go on, not to be busy

    def stop(self) -> None:
        self.width = 0
        for thread in self._threads:
            thread.join(LIMIT_S)


@pytest.mark.full
def test_replicas_come_and_go_with_the_load(served: RayServed) -> None:
    """1, 2, 1 replicas while requests go on: none fails, by the tokens of the prompts that are held."""
    assert len(served.replicas()) == 1
    load = Load(served)
    try:
        load.widen(8)
        served.until(lambda: len(served.replicas()) == 2)
        at_two = load.num_done
        served.until(lambda: load.num_done >= at_two + 20)
        load.width = 1
        served.until(lambda: len(served.replicas()) == 1)
        at_one = load.num_done
        served.until(lambda: load.num_done >= at_one + 5)
    finally:
        load.stop()
    print(f"{load.num_done} requests, {len(load.failed)} failed")
    assert load.failed == []


def test_no_stream_is_cut_by_the_death_of_a_replica(served: RayServed) -> None:
    """0 of 12 by `kill -9` of the only replica, and each says what it would have said."""
    # One outlasts the wave that it is in, so that the signal comes in the middle of a stream on any machine.
    bodies = [story(0, 300), *(story(number, 40) for number in range(1, 12))]
    with ThreadPoolExecutor(6) as pool:
        unbroken = list(pool.map(lambda body: told(served, body), bodies))
        assert not [text for text in unbroken if text.startswith("broken")]
        [pid], has_text = served.replicas(), threading.Event()
        running = [pool.submit(told, served, bodies[0], has_text.set)]
        running += [pool.submit(told, served, body) for body in bodies[1:]]
        served.until(lambda: has_text.is_set() and sum(each.done() for each in running) >= 3)
        os.kill(pid, signal.SIGKILL)
        assert [each.result() for each in running] == unbroken
    served.until(lambda: "to another replica" in served.text())  # Ray forwards lines some time later
