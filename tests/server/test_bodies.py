"""Large bodies are read by processes of their own: what they do to one of them costs one request."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import resource
import signal
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from harness import Harness
from server_tiny import TEMPLATE, write_model

from dovetail.base.forks import ForkServer, ForkStartError, GoneError, receive
from dovetail.contracts.errors import RequestError
from dovetail.grammar.compile.memory import resident_bytes
from dovetail_server.http.auth import NO_CALLER
from dovetail_server.reading import context, tasks
from dovetail_server.reading.allocator import return_large_blocks
from dovetail_server.reading.child import NICE
from dovetail_server.reading.pool import WorkerExchange
from dovetail_server.reading.wire import LARGE, BodyJob, BodyResult
from dovetail_server.reading.work import do
from dovetail_server.serving.served import Served

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
PAD = "x" * (LARGE + 1000)
SLOW = '{%- for m in messages %}{% if m.content[:4] == "slow" %}{% for a in range(90000) %}{% for b in range(90000) %}'
SLOW += "{% endfor %}{% endfor %}{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A server with a long context, and a template that never ends where a message begins with "slow"."""
    from dovetail_parsers.reasoning.think_tags import Qwen3Reasoning
    from dovetail_parsers.tools.hermes import HermesTools

    folder = write_model(tmp_path_factory.mktemp("tiny"))
    (folder / "chat_template.jinja").write_text(SLOW + TEMPLATE)
    harness = Harness(
        folder, reasoning=Qwen3Reasoning(), tools=HermesTools(), context_len=1 << 20, max_prompt_bytes=1 << 24
    )
    yield harness
    harness.close()


@pytest.fixture
def fresh(server: Harness) -> Harness:
    server.reset()
    return server


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, say("$")),
    (CHAT, say("$", n=2, seed=3, logprobs=True, top_logprobs=2, stop=["lo"])),
    (CHAT, say("$", stream=True, stream_options={"include_usage": True})),
    (CHAT, say("$", max_tokens=0, return_token_ids=True)),
    (CHAT, say("hi", tools=[{"type": "function", "function": {"name": "f", "description": "$"}}])),
    (CHAT, say("hi", input_ids="$ids", return_token_ids=True)),
    (CHAT, say("hi", documents=[{"text": "$"}])),
    (CHAT, say("hi", unknown="$")),
    (CHAT, say("$", model="another")),
    (CHAT, say("$", top_logprobs=2)),
    (CHAT, say("$", max_tokens=1 << 20)),
    (CHAT, {"model": "tiny", "messages": [{"role": "assistant", "content": "$"}], "continue_final_message": True}),
    ("/v1/chat/completions/render", say("$")),
    ("/v1/completions", {"model": "tiny", "prompt": "$", "echo": True, "logprobs": 1, "max_tokens": 3}),
    ("/v1/completions", {"model": "tiny", "prompt": ["$", "b"], "n": 2, "stream": True}),
    ("/v1/completions", {"model": "tiny", "prompt": "$ids", "truncate_prompt_tokens": 5, "return_token_ids": True}),
    ("/v1/completions", {"model": "tiny", "prompt": "$ids", "echo": True}),
    ("/v1/completions", {"model": "tiny", "prompt": ["$", 5]}),
    ("/v1/completions/render", {"model": "tiny", "prompt": ["$", "b"]}),
    ("/generate", {"text": "$", "sampling_params": {"max_new_tokens": 3}}),
    ("/generate", {"text": ["$"], "return_logprob": True, "logprob_start_len": 0}),
    ("/generate", {"model": "unknown", "input_ids": ["$ids", [5]], "stream": True}),
    ("/generate", {"text": "$", "input_ids": [5]}),
    ("/v1/messages", say("$", max_tokens=9, system="Be brief.")),
    ("/v1/messages", say("$", max_tokens=1 << 20, stream=True)),
    ("/v1/messages", say("$", max_tokens=0)),
    ("/v1/messages/count_tokens", say("$", system="Be brief.")),
    ("/v1/messages/render", say("$", max_tokens=9)),
    ("/v1/responses", {"model": "tiny", "input": "$", "store": False}),
    ("/v1/responses", {"model": "tiny", "input": "$", "store": False, "stream": True}),
    ("/v1/responses", {"model": "tiny", "input": say("$")["messages"], "truncation": "auto", "store": False}),
    ("/v1/responses", {"model": "tiny", "input": "$", "previous_response_id": "resp_none"}),
    ("/v1/responses/input_tokens", {"model": "tiny", "input": "$", "instructions": "Be brief."}),
    ("/v1/responses/compact", {"model": "tiny", "input": say("$")["messages"]}),
    ("/v1/score", {"model": "tiny", "query": "$", "items": ["a", "b"], "label_token_ids": [65, 66]}),
    ("/v1/score", {"model": "tiny", "query": "$ids", "items": ["$ids"], "label_token_ids": [65], "item_first": True}),
    (CHAT, {"model": "tiny", "messages": [{"role": "assistant", "content": "$"}], "echo": True}),
    ("/v1/responses/render", {"model": "tiny", "input": "$"}),
    ("/tokenize", {"model": "tiny", "prompt": "$"}),
    ("/tokenize", {"model": "tiny", "messages": say("$")["messages"], "return_token_strs": True}),
    ("/tokenize", {"model": "another", "prompt": "$"}),
    ("/detokenize", {"model": "tiny", "tokens": "$ids"}),
    ("/separate_reasoning", {"text": "<think>$</think>b"}),
    ("/separate_reasoning", {"text": "$", "reasoning_parser": "deepseek-r1"}),
    ("/parse_function_call", {"text": '<tool_call>{"name":"f","arguments":{"a":"$"}}</tool_call>'}),
]


def filled(value: Any) -> Any:
    """Return a body with a long text in it, though of fewer bytes than others need to read it."""
    if isinstance(value, dict):
        return {key: filled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item) for item in value]
    if value == "$ids":
        return [65] * 500
    return value.replace("$", "x" * 2000) if isinstance(value, str) else value


VOLATILE = ("id", "item_id", "created", "created_at", "request_id", "completed_at", "e2e_latency")


def plain(text: str) -> Any:
    """Return what a reply says, without what differs every time."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items() if key not in VOLATILE}
        return [walk(item) for item in value] if isinstance(value, list) else value

    found = []
    for line in text.splitlines():
        line = line.removeprefix("data: ")
        try:
            found.append(walk(json.loads(line)))
        except ValueError:
            found.append(line)
    return found


@pytest.mark.parametrize("at", range(len(BODIES)), ids=lambda at: f"{at}-{BODIES[at][0]}")
def test_a_large_body_gets_the_reply_of_a_small_one(at: int, fresh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads it, the reply is the same: whole, streamed, counted, rendered or refused."""
    path, body = BODIES[at]
    body = filled(body)
    monkeypatch.setattr(fresh.state.bodies, "takes", lambda num_bytes: True)
    there = fresh.post(path, body)
    submitted = [submit.prompt_ids for submit in fresh.engine.submits]
    fresh.reset()
    monkeypatch.setattr(fresh.state.bodies, "takes", lambda num_bytes: False)
    here = fresh.post(path, body)
    assert there.status_code == here.status_code
    assert there.status_code in (200, 400, 404), there.text[:500]
    assert submitted == [submit.prompt_ids for submit in fresh.engine.submits]
    assert plain(there.text) == plain(here.text)
    assert fresh.state.bodies.fork_server_pid is not None


def pids(harness: Harness) -> set[int]:
    """Wait for processes that read bodies, and return them."""
    harness.eventually(lambda: bool(harness.state.bodies.pids))
    return set(harness.state.bodies.pids)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def patient(fresh: Harness, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """A server whose processes may take their time."""
    monkeypatch.setattr(fresh.state.bodies, "_cpu_s", 600.0)
    return fresh


def test_the_death_of_a_process_is_one_request_s(patient: Harness) -> None:
    """Killed by whatever, it costs the request that it read, which is told so; others are served by the next ones."""
    with ThreadPoolExecutor(2) as threads:
        doomed = threads.submit(patient.post, CHAT, say("slow" + PAD))
        [pid] = pids(patient)
        assert patient.post(CHAT, say(PAD)).status_code == 200
        assert patient.post(CHAT, say("hi")).status_code == 200
        os.kill(pid, signal.SIGKILL)
        reply = doomed.result(60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "body_process_died")
    assert "process that reads requests died" in reply.json()["error"]["message"]
    assert reply.headers["retry-after"]
    assert patient.post(CHAT, say(PAD)).status_code == 200
    assert not patient.state.bodies.pids


def test_the_process_that_forks_the_others_may_die(fresh: Harness) -> None:
    """A process that waits may still read the next bodies; the one after it starts another."""
    assert fresh.post(CHAT, say(PAD)).status_code == 200
    before = fresh.state.bodies.fork_server_pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert fresh.post(CHAT, say(PAD)).status_code == 200
    assert fresh.post(CHAT, say(PAD, model="another")).status_code == 404
    for _ in range(2):
        assert fresh.post(CHAT, say(PAD)).status_code == 200
    assert fresh.state.bodies.fork_server_pid not in (None, before)


def test_a_process_that_does_not_start_is_not_awaited_for_ever(
    make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that wait for the first process are told so in their time; it goes on starting, and serves who comes next."""
    harness = make_harness(context_len=1 << 20)
    goes_on, starts = threading.Event(), []
    load = ForkServer.load

    def slow(self: ForkServer, start: Any) -> None:
        starts.append(self.pid)
        assert goes_on.wait(60)
        load(self, start)

    monkeypatch.setattr(ForkServer, "load", slow)
    monkeypatch.setattr(harness.state.bodies, "_cpu_s", 0.05)
    with ThreadPoolExecutor(4) as threads:
        replies = [each.result(60) for each in [threads.submit(harness.post, CHAT, say(PAD)) for _ in range(4)]]
    assert {(reply.status_code, reply.json()["error"]["code"]) for reply in replies} == {(503, "body_process_died")}
    assert all("in time" in reply.json()["error"]["message"] for reply in replies)
    monkeypatch.setattr(harness.state.bodies, "_cpu_s", 60.0)
    goes_on.set()
    assert harness.post(CHAT, say(PAD)).status_code == 200
    assert starts == [harness.state.bodies.fork_server_pid]


def test_a_server_that_ends_does_not_wait_for_a_process_that_starts(
    make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is ended as well."""
    harness = make_harness(context_len=1 << 20)
    begun = threading.Event()
    made: list[ForkServer] = []

    def never(self: ForkServer, start: Any) -> None:
        made.append(self)
        begun.set()
        try:
            receive(self._control)
        except GoneError as error:
            raise ForkStartError(str(error)) from None

    monkeypatch.setattr(ForkServer, "load", never)
    harness.state.bodies.warm_up()
    assert begun.wait(60)
    harness.state.bodies.close()
    assert is_gone(made[0].pid)
    assert harness.post(CHAT, say(PAD)).status_code == 200, "the server reads it itself"


@pytest.mark.parametrize("where", ["start", "fork", "thread"])
def test_no_room_for_another_process_socket_or_thread(
    where: str, make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That costs the request that wanted it: told to come again, and served then."""
    harness = make_harness(context_len=1 << 20)
    if where == "fork":
        assert harness.post(CHAT, say(PAD)).status_code == 200

    def full(*args: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    def no_thread(**_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        if where == "thread":
            patch.setattr("dovetail.base.forks.threading", SimpleNamespace(Thread=no_thread))
        else:
            patch.setattr("dovetail.base.forks.socket.socketpair", full)
        if where == "fork":
            assert harness.post(CHAT, say(PAD, model="another")).status_code == 404, "a process waited for it"
        reply = harness.post(CHAT, say(PAD))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "body_process_died")
    assert ("new thread" if where == "thread" else "Too many open files") in reply.json()["error"]["message"]
    assert harness.post(CHAT, say(PAD)).status_code == 200


def copies(harness: Harness) -> list[int]:
    """Return the ids of the processes that read bodies or wait for some."""
    parent = harness.state.bodies.fork_server_pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    nice = os.getpriority(os.PRIO_PROCESS, parent or 0) + NICE  # not this thread's: another may have started it
    return [int(child) for child in children if os.getpriority(os.PRIO_PROCESS, int(child)) == nice]


def waiting(harness: Harness) -> int:
    """Return the id of the process that waits for the next body."""
    found = list[int]()

    def is_there() -> bool:
        found[:] = copies(harness)
        return len(found) == 1 and not harness.state.bodies.pids

    harness.eventually(is_there)
    return found[0]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are looked up in /proc")
def test_a_process_waits_for_the_next_body(make_harness: Callable[..., Harness]) -> None:
    """From the start on, one and no more; killed while it waits it costs nobody anything, and it ends with the pool."""
    harness = make_harness(context_len=1 << 20)
    harness.state.bodies.warm_up()
    assert harness.state.bodies._template is not None
    template = harness.state.bodies._template.ready().result().pid  # as the first start it may import all for others
    first = waiting(harness)
    assert harness.post(CHAT, say(PAD, model="another")).status_code == 404
    harness.eventually(lambda: is_gone(first))
    second = waiting(harness)
    os.kill(second, signal.SIGKILL)
    harness.eventually(lambda: is_gone(second))
    assert harness.post(CHAT, say(PAD)).status_code == 200
    assert harness.state.bodies.fork_server_pid == template
    third = waiting(harness)
    harness.state.bodies.close()
    harness.eventually(lambda: is_gone(third))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are looked up in /proc")
def test_a_process_that_did_well_takes_the_next_body(
    make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limits of time and memory are each job's own, and so is the memory that it is said to take."""
    harness, outcomes = make_harness(context_len=1 << 20), list[BodyResult]()
    run = harness.state.bodies.run

    async def noted(*args: Any, **options: Any) -> BodyResult:
        outcomes.append(await run(*args, **options))
        return outcomes[-1]

    monkeypatch.setattr(harness.state.bodies, "run", noted)
    harness.state.bodies.warm_up()
    assert harness.state.bodies._template is not None
    harness.state.bodies._template.ready().result()
    first = waiting(harness)
    before = [resource.prlimit(first, kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]
    prompts = []
    for text in (PAD, "a b " * (LARGE >> 1), "a b " * (LARGE >> 1), "x" + PAD):
        harness.engine.submits.clear()
        assert harness.post(CHAT, say(text)).status_code == 200
        prompts.append(harness.engine.submits[0].prompt_ids)
        assert waiting(harness) == first
        harness.eventually(
            lambda: before == [resource.prlimit(first, kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]
        )
    assert prompts[1] == prompts[2]
    assert len(prompts[3]) == len(prompts[0]) + 1
    assert all(outcome.grown_bytes > LARGE for outcome in outcomes[1:3])


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are looked up in /proc")
def test_so_many_processes_wait_as_may_work(make_harness: Callable[..., Harness]) -> None:
    """Not one for each body that came at once."""
    harness = make_harness(context_len=1 << 20)
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: harness.post(CHAT, say(PAD)), range(8)))
    assert {reply.status_code for reply in replies} == {200}
    harness.eventually(lambda: 1 <= len(copies(harness)) <= context.num_processes(None))


def test_a_body_that_comes_while_a_process_is_started_ahead_takes_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is there before the process: else there would be two, of which one waits for ever."""
    server, taken = object.__new__(ForkServer), list[Any]()
    server._control, server._waiting = socket.socket(), deque()
    monkeypatch.setattr("dovetail.base.forks.socket.send_fds", lambda *_: taken.append(server.take_waiting()))
    server.fork_ahead()
    assert len(taken) == 1
    assert taken[0] is not None
    assert not server._waiting
    taken[0].close()
    server._control.close()


def test_a_template_without_end_is_ended(fresh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that takes more processor time than it may is refused, and its process is gone."""
    assert fresh.post(CHAT, say(PAD)).status_code == 200  # the first process is there
    monkeypatch.setattr(fresh.state.bodies, "_cpu_s", 0.3)
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(fresh.post, CHAT, say("slow" + PAD))
        [pid] = pids(fresh)
        found = reply.result(60)
    assert (found.status_code, found.json()["error"]["code"]) == (400, "body_too_costly")
    fresh.eventually(lambda: is_gone(pid))


def test_a_client_that_leaves_takes_the_process_along(patient: Harness) -> None:
    """Nobody computes for nobody."""
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(patient.base + CHAT, json=say("slow" + PAD), timeout=1)
    patient.eventually(lambda: not patient.state.bodies.pids)
    assert not patient.engine.submits


def test_many_large_bodies_wait_for_their_turn(fresh: Harness) -> None:
    """Eight at once: two are read at a time, all are answered, and the memory that they took goes back."""
    body = json.dumps(say("x" * (1 << 17))).encode() + b" " * (4 << 20)
    most = waiting = 0

    def watch(stop: threading.Event) -> None:
        nonlocal most, waiting
        while not stop.wait(0.001):
            most = max(most, len(fresh.state.bodies.pids))
            waiting = max(waiting, fresh.state.bodies.num_waiting)

    def send() -> int:
        return requests.post(fresh.base + CHAT, data=body, headers=JSON, timeout=120).status_code

    def send_all() -> int:
        with ThreadPoolExecutor(8) as threads:
            assert [each.result() for each in [threads.submit(send) for _ in range(8)]] == [200] * 8
        fresh.eventually(lambda: fresh.state.num_held_bytes == 0)
        fresh.engine.submits.clear()
        return resident_bytes()

    return_large_blocks()
    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(stop,))
    watcher.start()
    before = send_all()
    stop.set()
    watcher.join()
    assert most == 2
    assert waiting > 2
    assert send_all() - before < 4 * len(body)


def test_what_waits_is_bounded(make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies beyond `--max-queued-bytes` are told to come again; those that wait are served."""
    harness = make_harness(context_len=1 << 20, max_queued_bytes=5 * len(PAD), body_processes=1)
    held, taken = threading.Event(), harness.state.bodies.takes
    harness.post(CHAT, say(PAD))

    async def hold(*args: Any, run: Any = harness.state.bodies.run, **options: Any) -> Any:
        while not held.is_set():
            await asyncio.sleep(0.01)
        return await run(*args, **options)

    monkeypatch.setattr(harness.state.bodies, "run", hold)
    assert taken(len(PAD))
    with ThreadPoolExecutor(9) as threads:
        replies = [threads.submit(harness.post, CHAT, say(PAD)) for _ in range(9)]
        harness.eventually(lambda: sum(reply.done() for reply in replies) >= 5)
        held.set()
        found = Counter(reply.result(60).status_code for reply in replies)
    assert found.keys() == {200, 429}
    assert found[200] == 4


def test_without_processes_the_server_reads_them_itself(make_harness: Callable[..., Harness]) -> None:
    """`--body-processes 0`."""
    harness = make_harness(context_len=1 << 20, body_processes=0)
    assert harness.post(CHAT, say(PAD)).status_code == 200
    assert harness.state.bodies.fork_server_pid is None


def test_what_stands_beside_the_prompt_is_bounded(fresh: Harness) -> None:
    """The server's own process reads it again."""
    reply = fresh.post(CHAT, say("hi", chat_template_kwargs={"a": "x" * (2 << 20)}))
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


def test_what_holds_no_prompt_is_small(fresh: Harness) -> None:
    """Routes without prompts take no large bodies."""
    reply = fresh.post("/v1/batches", {"input_file_id": "x" * (2 << 20)})
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("error", [MemoryError(), ValueError("a bug")])
def test_what_a_task_raises_is_its_request_s(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory is a refusal, anything else a fault with its traceback."""

    def fail(call: Any) -> bytes:
        raise error

    task = dataclasses.replace(tasks.TOKENIZE, run=fail)
    monkeypatch.setitem(tasks.TASKS, "tokenize", task)
    job = BodyJob(task="tokenize", num_bytes=2, is_line=False, cpu_s=1)
    outcome = do(job, lambda: b"{}", None, Served(["tiny"], []), tasks.no_answer)  # type: ignore[arg-type]
    if isinstance(error, MemoryError):
        assert outcome.refusal is not None
        assert outcome.refusal.code == "body_too_costly"
    else:
        assert "a bug" in (outcome.fault or "")


@pytest.mark.parametrize("salted", ["", "request", "caller"])
def test_pieces_are_known_to_later_bodies(salted: str, fresh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same process, and not of requests with a salt: how long they take would tell others of them."""
    jobs: list[BodyJob] = []
    run = WorkerExchange.run

    async def noted(self: WorkerExchange, job: BodyJob, raw: bytes, answer: Any) -> BodyResult:
        jobs.append(job)
        return await run(self, job, raw, answer)

    monkeypatch.setattr(WorkerExchange, "run", noted)
    if salted == "caller":
        salt = dataclasses.replace(NO_CALLER, cache_root="a")
        monkeypatch.setattr("dovetail_server.reading.pool.CALLER", SimpleNamespace(get=lambda: salt))
    body = say(PAD, cache_salt="s") if salted == "request" else say(PAD)
    assert fresh.post(CHAT, body).status_code == 200
    assert jobs[0].keeps == (salted != "caller")
    kept: list[bool] = []
    text = SimpleNamespace()

    def rendered(self: Any, *, keeps: bool) -> Any:
        kept.append(keeps)
        raise RequestError("enough")

    monkeypatch.setattr("dovetail.processing.input.Preparation.rendered", rendered)
    do(jobs[0], lambda: json.dumps(body).encode(), text, Served(["tiny"], []), tasks.no_answer)  # type: ignore[arg-type]
    assert kept == [not salted]


@pytest.mark.parametrize(("cores", "wanted"), [(1, 2), (11, 2), (16, 4), (128, 8)])
def test_how_many_processes_read_follows_from_the_cores(
    cores: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless somebody says, and none is a number, too."""
    monkeypatch.setattr(context, "num_cores", lambda: cores)
    assert context.num_processes(None) == wanted
    assert [context.num_processes(asked) for asked in (0, 1, 256)] == [0, 1, 256]
