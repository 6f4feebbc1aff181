"""A checkpoint's template and tokenizer, whatever they do, cost the request that runs them, and nobody else."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from harness import Harness
from server_tiny import TEMPLATE, tokenizer, write_model
from tokenizers import Regex, normalizers, pre_tokenizers

from dovetail.contracts.errors import RequestError
from dovetail_server.batches.execute import prepare
from dovetail_server.reading import pool
from dovetail_server.reading.work import part_of

CHAT = "/v1/chat/completions"
MOST_S = 0.2
"""A callback may take 0.015 by `INLINE`, and what a busy machine adds; unbounded ones take seconds."""
BUSY = """
{%- if messages[0].content == "select" %}{% set l = range(99999) | list %}
{{- range(99999) | select("in", l) | list | length }}{% endif %}
{%- if messages[0].content == "sort" %}{% for i in range(99999) %}
{{- range(999) | sort | length }}{% endfor %}{% endif %}
{%- if messages[0].content == "links" %}{{ ("www." * 9999) | urlize }}{% endif %}
{%- if messages[0].content == "memory" %}{{ ("\\t" * 65536).expandtabs(65536) }}{% endif %}
{%- if messages[0].content == "items" %}{{ range(12000) | map("string") | list | length }}{% endif %}"""
PANICS = "(a+)+$"
"""For 2,000 `a` and a `b`."""
ENDLESS = "(e|ee){20}[xy]z"
"""Goes back a million times at each place."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A server of a model whose template and tokenizer are hostile where a message says so."""
    folder = write_model(tmp_path_factory.mktemp("hostile"))
    ordinary = tokenizer(write_model(tmp_path_factory.mktemp("ordinary")))
    (folder / "chat_template.jinja").write_text(BUSY + TEMPLATE)
    harness = Harness(folder, context_len=1 << 17, max_prompt_bytes=1 << 24)
    harness.tokenizer = ordinary  # the engine speaks in tokens of its own
    harness.reset()
    assert harness.post(CHAT, say("x" * 99999)).status_code == 200  # the processes are there
    harness.state.bodies._cpu_s = 0.2
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def cutting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A server of a model whose tokenizer panics, goes back without end, or makes a gigabyte, each of other letters."""
    folder = write_model(tmp_path_factory.mktemp("cutting"))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    cuts = [pre_tokenizers.Split(Regex(source), "isolated") for source in (PANICS, ENDLESS)]
    backend.normalizer = normalizers.Replace("z", "z" * (1 << 20))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.save(str(folder / "tokenizer.json"))
    harness = Harness(folder, context_len=1 << 16)
    harness.tokenizer = tokenizer(write_model(tmp_path_factory.mktemp("ordinary")))  # the engine's
    harness.reset()
    assert harness.post("/v1/completions", {"model": "tiny", "prompt": "hello"}).status_code == 200
    yield harness
    harness.close()


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time counts here, however busy the machine is."""
    monkeypatch.setattr(pool, "SLOWER", 200)


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Processor time of each callback of event loops, without rounds of the garbage collector over a test's process."""
    found: list[float] = []
    run = asyncio.events.Handle._run

    def timed(self: asyncio.Handle) -> None:
        began = time.thread_time()
        run(self)
        found.append(time.thread_time() - began)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("what", ["select", "sort", "links", "memory"])
def test_a_template_that_takes_too_much_stops_nobody(what: str, server: Harness, callbacks: list[float]) -> None:
    """A chat of a few bytes is refused as the template's fault; meanwhile others are answered at once."""
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(server.post, CHAT, say(what))
        while not busy.done():
            began = time.monotonic()
            assert server.get("/livez").status_code == 200
            assert time.monotonic() - began < 2
    reply = busy.result()
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (500, "chat_template_failed", "server_error")
    assert "chat template" in error["message"]
    assert "not at fault" in error["message"]
    assert max(callbacks) < MOST_S
    assert server.post(CHAT, say("hi")).status_code == 200


def test_a_template_that_is_merely_slow_is_served(server: Harness) -> None:
    """What is too much for the event loop is rendered elsewhere, with the same prompt."""
    server.reset()
    assert server.post(CHAT, say("items")).status_code == 200
    [submit] = server.engine.submits
    assert "12000" in server.tokenizer.decode(submit.prompt_ids, skip_special_tokens=False)


ROUTES: list[tuple[str, Callable[[str], dict[str, Any]]]] = [
    ("/v1/completions", lambda text: {"model": "tiny", "prompt": text}),
    (CHAT, say),
    ("/v1/messages", lambda text: say(text, max_tokens=5)),
    ("/v1/responses", lambda text: {"model": "tiny", "input": text, "store": False}),
    ("/v1/responses/input_tokens", lambda text: {"model": "tiny", "input": text}),
    ("/tokenize", lambda text: {"model": "tiny", "prompt": text}),
    ("/v1/score", lambda text: {"model": "tiny", "query": text, "items": ["a"], "label_token_ids": [65]}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
def test_a_tokenizer_that_panics_costs_its_request(
    path: str, body: Callable[[str], dict[str, Any]], cutting: Harness, callbacks: list[float]
) -> None:
    """A 500 as others are, which names it; other texts are served."""
    reply = cutting.post(path, body("a" * 2000 + "b"))
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (500, "api_error" if "messages" in path else "server_error")
    assert "model's tokenizer failed" in error["message"]
    assert cutting.post(path, body("hello")).status_code == 200
    assert max(callbacks) < MOST_S


def test_a_tokenizer_without_end_is_ended(
    cutting: Harness, callbacks: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In native code, which no exception ends."""
    monkeypatch.setattr(cutting.state.bodies, "_cpu_s", 0.2)
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(cutting.post, CHAT, say("e" * 2000 + "b xz"))
        while not busy.done():
            assert cutting.get("/livez").status_code == 200
    reply = busy.result()
    assert reply.status_code == 500, reply.text
    assert "chat template or tokenizer takes too much time" in reply.json()["error"]["message"]
    assert max(callbacks) < MOST_S


def test_a_tokenizer_that_takes_all_memory_is_named(cutting: Harness) -> None:
    """Native code that gets none ends its process, which says nothing any more."""
    reply = cutting.post(CHAT, say("z" * 2000))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "body_process_died")
    assert "died while it ran the model's chat template or tokenizer" in reply.json()["error"]["message"]


def test_what_needs_the_tokenizer_beside_a_prompt_is_refused(cutting: Harness) -> None:
    """It would run in the server's process."""
    reply = cutting.post(CHAT, say("hi", bad_words=["a"]))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported")
    assert "bad_words" in reply.json()["error"]["message"]


@pytest.mark.parametrize("endpoint", [CHAT, "/v1/responses"])
def test_a_line_of_a_batch_has_the_same_end(endpoint: str, server: Harness) -> None:
    """It is the line's result: tried again, it would take as long."""
    content = {"messages": say("sort")["messages"]} if endpoint == CHAT else {"input": "sort", "store": False}
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "tiny", **content}}
    made = asyncio.run_coroutine_threadsafe(prepare(server.state, endpoint, json.dumps(line).encode()), server.loop)
    with pytest.raises(RequestError, match="chat template") as found:
        made.result(60)
    assert found.value.status == 500


def test_what_was_at_work_is_seen_from_a_traceback(server: Harness) -> None:
    """The template's code, the tokenizer's, or neither."""
    with pytest.raises(RequestError) as found:
        server.state.text.tokenizer.encode("\0", add_special_tokens=False)
    assert part_of(found.value) == "tokenizer"
    with pytest.raises(RequestError) as refused:
        server.state.text.template.render([{"role": "user", "content": None}], template_kwargs={"tools": 1})
    assert part_of(refused.value) is None


def test_nothing_of_ours_is_run_elsewhere(
    make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small chat with a template of our own never waits for another process."""
    harness = make_harness()
    monkeypatch.setattr(harness.state.bodies, "run", None)
    assert harness.post(CHAT, say("hi")).status_code == 200


def test_without_processes_limits_are_those_of_a_process(make_harness: Callable[..., Harness], folder: Path) -> None:
    """`--body-processes 0`: the server renders by itself, for as long as that takes."""
    harness = make_harness(body_processes=0)
    assert harness.state.text.tokenizer.max_chars == sys.maxsize
    assert harness.state.text.template.limits.seconds == 5
