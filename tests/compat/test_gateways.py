"""Gateways of SGLang and vLLM, unchanged, in front of two servers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from programs import Worker

pytestmark = pytest.mark.registry
LOOKS = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1")
"""A worker that stops serves on for five seconds, and says that it stops."""
GROUPS, PER_GROUP, IN_FLIGHT = 13, 5, 4
MODEL = "dovetail-demo"


@dataclass(frozen=True)
class Gateway:
    """A gateway's package, and the flags of a policy that follows prefixes."""

    package: str
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.package.partition("==")[0]


GATEWAYS = {
    "smg": Gateway("smg==1.13.0", ("launch", "--policy", "cache_aware")),
    "sglang-router": Gateway("sglang-router==0.3.2", ("launch", "--policy", "cache_aware")),
    "vllm-router": Gateway("vllm-router==0.1.17", ("--policy", "cache_aware")),
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running(gateway: Gateway, folder: Path, workers: list[Worker]) -> Iterator[str]:
    """Run a gateway until it knows both workers; yields its address."""
    port, probe = free_port(), free_port()
    command = [
        sys.executable, str(folder / "bin" / gateway.name), *gateway.command,
        "--worker-urls", *(worker.base for worker in workers), "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(probe), *LOOKS,
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(folder)}, stdout=log, stderr=subprocess.STDOUT
        )
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not is_up(base):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{gateway.name} does not start:\n{(folder / 'log').read_text()[-3000:]}")
            time.sleep(0.2)
        yield base
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def is_up(base: str) -> bool:
    try:
        reply = requests.post(
            f"{base}/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
            timeout=20,
        )
    except requests.ConnectionError:
        return False
    return reply.status_code == 200


MAX_ROUNDS = 8
"""On a busy machine replies overlap in other ways, and a router balances loads where it would follow a prefix."""


def body(group: int, member: int) -> dict[str, Any]:
    """A chat request; those of a group share a system prompt of some 430 tokens."""
    rules = " ".join(f"Rule {group}.{n}: answer in {group + n} words." for n in range(28))
    question = f"Capital {group * 100 + member}?"
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}


def load(base: str) -> list[int]:
    """Send every group's requests, as many at once as a small service has."""
    with requests.Session() as session, ThreadPoolExecutor(IN_FLIGHT) as pool:
        order = [(g, m) for m in range(PER_GROUP) for g in range(GROUPS)]
        post = session.post
        replies = pool.map(lambda at: post(f"{base}/v1/chat/completions", json=body(*at), timeout=60), order)
        return [reply.status_code for reply in replies]


def hit_rate(workers: list[Worker], before: list[tuple[float, float]]) -> float:
    now = counts(workers)
    cached = sum(b[0] - a[0] for a, b in zip(before, now, strict=True))
    return cached / sum(b[1] - a[1] for a, b in zip(before, now, strict=True))


def counts(workers: list[Worker]) -> list[tuple[float, float]]:
    names = ("dovetail_cached_prompt_tokens_total", "dovetail_prompt_tokens_total")
    return [(worker.count(names[0]), worker.count(names[1])) for worker in workers]


@pytest.fixture(
    scope="session", params=["smg", *(pytest.param(name, marks=pytest.mark.full) for name in GATEWAYS if name != "smg")]
)
def gateway(request: pytest.FixtureRequest, python_package: Callable[..., Path]) -> tuple[Gateway, Path]:
    chosen = GATEWAYS[request.param]
    return chosen, python_package(chosen.package, "setproctitle", "orjson")


def test_a_gateway_serves_everything_and_finds_prefixes(gateway: tuple[Gateway, Path], workers: list[Worker]) -> None:
    """65 of 65 chat requests succeed, at the hit rate of a router that follows prefixes; so does every other route."""
    rates: list[float] = []
    with running(*gateway, workers) as base:
        while len(rates) < MAX_ROUNDS and max(rates, default=0) < 0.74:
            for worker in workers:
                requests.post(f"{worker.base}/flush_cache", timeout=30)
            before = counts(workers)
            assert load(base) == [200] * (GROUPS * PER_GROUP)
            rates.append(hit_rate(workers, before))
        print(f"{gateway[0].name}: prefix hit {', '.join(f'{rate:.3f}' for rate in rates)}")
        assert max(rates) >= 0.74
        check_routes(base)


def check_routes(base: str) -> None:
    """Streams, tools, completions, responses, messages and the native route get through."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    for path, sent in {
        "/v1/chat/completions": {**chat, "tools": [tool], "tool_choice": "required", "max_tokens": 64},
        "/v1/completions": {"model": MODEL, "prompt": "The capital of", "max_tokens": 4},
        "/generate": {"text": "The capital of", "sampling_params": {"max_new_tokens": 4}},
        "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 8},
        "/v1/messages": {**chat, "max_tokens": 8},
    }.items():
        reply = requests.post(base + path, json=sent, timeout=60)
        if reply.status_code == 404 and reply.text == "":
            continue  # the gateway itself has no such route
        assert reply.status_code == 200, (path, reply.text)
    with requests.post(f"{base}/v1/chat/completions", json={**chat, "stream": True}, stream=True, timeout=60) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == b"data: [DONE]"
    told = "".join(c["delta"].get("content") or "" for line in lines[:-1] for c in json.loads(line[6:])["choices"])
    assert "Paris" in told


@pytest.mark.full
def test_streams_outlive_the_end_of_a_worker(gateway: tuple[Gateway, Path]) -> None:
    """40 of 40 streams are whole though one of two workers gets SIGTERM among them."""
    started = [Worker(is_light=True), Worker(is_light=True)]
    ended: list[str] = []
    lock = threading.Lock()

    def one(base: str, number: int) -> str:
        sent = {**body(number, 0), "stream": True, "max_tokens": 24, "ignore_eos": True}
        with requests.post(f"{base}/v1/chat/completions", json=sent, stream=True, timeout=60) as reply:
            lines = [line for line in reply.iter_lines() if line]
        text = (
            "whole"
            if reply.status_code == 200 and lines[-1] == b"data: [DONE]"
            else f"{reply.status_code} {lines[-2:]}"
        )
        with lock:
            ended.append(text)
            if len(ended) == 15:
                os.kill(started[0].process.pid, signal.SIGTERM)
        return text

    try:
        for worker in started:
            worker.wait()
        with running(*gateway, started) as base, ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(lambda n: one(base, n), range(40)))
    finally:
        for worker in started:
            worker.close()
    assert ended == ["whole"] * 40
