"""Compiling beside the engine: processes that are killed, limits, caches, one compilation for many."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
from grammar_demo import Demo, json_option

from dovetail.base.forks import ForkServer, ForkTemplate
from dovetail.contracts.grammar import CompiledGrammar, GrammarBackend, Vocabulary
from dovetail.grammar.compile.cache import IDLE_S, LARGE_BYTES, Enforced, GrammarCache, RejectedGrammar
from dovetail.grammar.compile.jobs import CompileFuture
from dovetail.grammar.compile.memory import Trimmer
from dovetail.grammar.compile.pool import ChildDiedError, ChildTimeoutError, FinalValidator, WorkerPool
from dovetail.grammar.compile.service import GrammarService
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.grammar.spec.wire import ChildJob, ChildStart
from dovetail.messages import GrammarOption
from dovetail.plugins import Registry, load, make_plan

HARD = "(((a{0,60}b){0,60}c){0,60}d){0,60}"
"""Takes seconds, and more memory than there may be."""
ENDLESS = "[ab]*a[ab]{20}"
"""A million states: minutes."""
"""An index over it takes minutes."""


def outlines_option(source: str) -> GrammarOption:
    """An option that is always compiled in a process of its own."""
    return GrammarOption(backend="outlines", kind="regex", source=source)


@pytest.fixture
def make_service(small: Vocabulary) -> Iterator[Callable[..., GrammarService]]:
    """Make services over the small vocabulary; xgrammar, which imports torch in each one's process, where asked for."""
    made: list[GrammarService] = []

    def make(timeout_s: float, *, deny: tuple[str, ...] = ("dovetail-llm:xgrammar",)) -> GrammarService:
        plan = make_plan(Registry.scan(deny=deny), grammar_backend="auto")
        made.append(GrammarService(load(plan, "engine"), lambda: small, timeout_s=timeout_s, cache_bytes=1 << 20))
        return made[-1]

    yield make
    for service in made:
        service.close()


def settle(service: GrammarService, future: CompileFuture, timeout_s: float = 240) -> Enforced | RejectedGrammar:
    """Wait for a future."""
    deadline = time.monotonic() + timeout_s
    while future.outcome is None:
        assert time.monotonic() < deadline
        service.wait(0.05)
    return future.outcome


def start_process(service: GrammarService) -> None:
    """Wait for the process that others are forked from: that it starts counts as well."""
    service._compiler.pool().wait_ready(240)


def test_a_vocabulary_travels(small: Vocabulary) -> None:
    """What a compile process gets is the same vocabulary."""
    start = ChildStart(vocabulary=replace(small, encode=None))
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=ChildStart).vocabulary
    assert copy is not None
    assert (list(copy.tokens), copy.size, copy.eos_ids, copy.special_ids) == (
        list(small.tokens),
        small.size,
        small.eos_ids,
        small.special_ids,
    )
    assert copy.fingerprint == small.fingerprint


def test_what_is_in_force_is_not_compiled_again_for_who_goes_on_with_it(
    make_service: Callable[[float], GrammarService],
) -> None:
    """A request that goes on after a restart knows its way: it shares with those that ask for all ways, and they do."""
    service = make_service(20)
    missing, good = GrammarOption(backend="missing", kind="regex", source="x"), outlines_option("[ab]{4}")
    whole = settle(service, service.request((missing, good)))
    assert isinstance(whole, Enforced)
    future = service.known((missing, good), 1)
    assert future is not None
    assert future.outcome is whole
    assert service.known((missing, good), 0) is None
    alone = settle(service, service.request((outlines_option("[ab]{5}"),)))
    later = settle(service, service.request((missing, outlines_option("[ab]{5}"))))
    assert isinstance(alone, Enforced)
    assert isinstance(later, Enforced)
    assert later.compiled is alone.compiled
    assert (alone.option, later.option) == (0, 1)


def test_equal_grammars_compile_once_and_are_remembered(make_service: Callable[[float], GrammarService]) -> None:
    """Requests that wait for the same grammar share a future; later ones have it at once, failures too."""
    service = make_service(20)
    steps, bad = (outlines_option("[ab]{3}"),), (outlines_option("("),)
    first, second = service.request(steps), service.request((outlines_option("[ab]{3}"),))
    assert first is second
    assert isinstance(settle(service, first), Enforced)
    again = service.request(steps)
    assert again.is_ready
    assert again.outcome is first.outcome
    refused = settle(service, service.request(bad))
    assert isinstance(refused, RejectedGrammar)
    assert refused.code == "invalid_grammar"
    assert service.request(bad).outcome is refused


def test_a_hanging_compilation_is_killed_alone(
    make_service: Callable[[float], GrammarService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one compilation hangs others go on, in threads and processes; at its limit it alone is killed."""
    service = make_service(600)
    hanging = service.request((outlines_option(ENDLESS),))
    inline = settle(service, service.request((json_option({"type": "integer"}),)))
    beside = settle(service, service.request((outlines_option("[cd]{2}"),)))
    assert isinstance(inline, Enforced)
    assert isinstance(beside, Enforced)
    assert hanging.outcome is None
    short = make_service(600)
    assert isinstance(settle(short, short.request((outlines_option("warm"),))), Enforced)
    template = template_of(short)
    monkeypatch.setattr(short, "_timeout_s", 1.0)
    refused = settle(short, short.request((outlines_option(ENDLESS),)))
    assert isinstance(refused, RejectedGrammar)
    assert refused.code == "grammar_too_complex"
    assert "too long" in refused.message
    assert pids_of(short) == []
    monkeypatch.setattr(short, "_timeout_s", 600.0)
    assert isinstance(settle(short, short.request((outlines_option("[ef]{2}"),))), Enforced)
    assert template_of(short) == template


def test_a_grammar_that_allows_no_text_is_not_enforced(make_service: Callable[..., GrammarService]) -> None:
    """One backend refuses endless references, another compiles them to nothing: the next way is taken."""
    pytest.importorskip("xgrammar")
    service = make_service(600, deny=())
    endless = '{"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}'
    steps = tuple(GrammarOption(backend=name, kind="json", source=endless) for name in ("llguidance", "xgrammar"))
    refused = settle(service, service.request(steps[1:]))
    assert isinstance(refused, RejectedGrammar)
    assert refused.code == "unsupported_grammar"
    enforced = settle(
        service, service.request((json_option({"anyOf": [{"$ref": "#"}]}), json_option({"type": "null"})))
    )
    assert isinstance(enforced, Enforced)
    assert enforced.option == 1


def test_a_killed_compile_process_costs_one_request(make_service: Callable[[float], GrammarService]) -> None:
    """A process that dies while it compiles ends that request with an error; the next one is compiled."""
    service = make_service(600)
    future = service.request((outlines_option(ENDLESS),))
    os.kill(working(service), signal.SIGKILL)
    refused = settle(service, future)
    assert isinstance(refused, RejectedGrammar)
    assert "crashed" in refused.message
    assert isinstance(settle(service, service.request((outlines_option("[gh]{2}"),))), Enforced)


def test_a_start_takes_nothing_of_a_grammars_time(
    make_service: Callable[[float], GrammarService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes while the first process still starts is compiled when that is there; later ones have less."""
    make = ForkTemplate._make

    def slow(template: ForkTemplate) -> ForkServer:
        time.sleep(3)
        return make(template)

    monkeypatch.setattr(ForkTemplate, "_make", slow)
    monkeypatch.setattr("dovetail.grammar.compile.service.START_S", 400.0)
    service = make_service(2.0)
    futures = [service.request((outlines_option(f"[gh]{{{num}}}"),)) for num in range(1, 5)]
    assert all(isinstance(settle(service, future), Enforced) for future in futures)
    began = time.monotonic()
    refused = settle(service, service.request((outlines_option(ENDLESS),)))
    assert isinstance(refused, RejectedGrammar)
    assert time.monotonic() - began < 200


def test_a_killed_template_costs_nothing(make_service: Callable[[float], GrammarService]) -> None:
    """What was forked from it goes on, and the next grammar is compiled by another."""
    service = make_service(600)
    future = service.request((outlines_option(ENDLESS),))
    pid, template = working(service), template_of(service)
    assert template is not None
    os.kill(template, signal.SIGKILL)
    assert isinstance(settle(service, service.request((outlines_option("[gh]{2}"),))), Enforced)
    assert template_of(service) != template
    assert pids_of(service) == [pid]
    assert not future.is_ready
    service.close()
    assert isinstance(settle(service, future), RejectedGrammar)


def pids_of(service: GrammarService) -> list[int]:
    """Return the ids of the processes that compile."""
    return [] if service._compiler._pool is None else service._compiler._pool.pids


def template_of(service: GrammarService) -> int | None:
    """Return the id of the process that those are forked from."""
    return None if service._compiler._pool is None else service._compiler._pool._fork_server.pid


def working(service: GrammarService) -> int:
    """Wait for a process that compiles; returns its id."""
    deadline = time.monotonic() + 240
    while not pids_of(service):
        assert time.monotonic() < deadline
        service.wait(0.05)
    [pid] = pids_of(service)
    return pid


def test_an_engine_survives_its_compile_process(make_demo: Callable[..., Demo]) -> None:
    """Through the engine: the request whose compilation dies gets an error, its neighbour and the next are served."""
    demo = make_demo(grammar_compile_timeout=3.0)
    results = demo.together([demo.one(outlines_option(HARD), max_tokens=5), demo.one(json_option({"enum": [7]}))])
    assert results[0].finish is not None
    assert (results[0].finish.reason, results[0].finish.code) == ("abort", "grammar_too_complex")
    assert json.loads(results[1].text) == 7
    assert demo.generate(outlines_option("[xy]{3}")).text.strip("xy") == ""


def test_memory_of_a_compilation_is_bounded(small: Vocabulary) -> None:
    """A compilation that wants more memory than it may have fails, and only it."""
    plan = make_plan(Registry.scan(), grammar_backend="outlines")
    pool = WorkerPool(ChildStart(plan=plan, vocabulary=replace(small, encode=None), max_bytes=64 << 20), 1)
    try:
        assert failed(pool, ChildJob(option=outlines_option(HARD), timeout_s=30))
        assert pool.run(ChildJob(option=outlines_option("ab"), timeout_s=20), 20).blob is not None
    finally:
        pool.close()


def failed(pool: WorkerPool, job: ChildJob) -> bool:
    """Whether a job fails, by an error or with its process."""
    try:
        return pool.run(job, job.timeout_s).error is not None
    except (ChildDiedError, ChildTimeoutError):
        return True


class Sized:
    """A grammar of some size."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def matcher(self) -> None:
        raise NotImplementedError


def made(size: int) -> Enforced:
    """A grammar of some size in force."""
    compiled: CompiledGrammar = Sized(size)  # type: ignore[assignment]
    backend: GrammarBackend = None  # type: ignore[assignment]
    return Enforced(0, compiled, backend)


def test_the_cache_is_bounded_in_bytes() -> None:
    """The least recently used grammar goes first, and one that is too large is not kept."""
    cache = GrammarCache(100, max_refused=2)
    for key in "abc":
        cache.put(key, made(40), 0)
        cache.get("a")
    assert cache.get("a") is not None
    assert cache.get("b") is None
    assert cache.num_bytes == 80
    cache.put("large", made(101), 0)
    assert cache.get("large") is None
    for key in range(3):
        cache.put(key, RejectedGrammar("no", "invalid_grammar"), 0)
    assert cache.get(0) is None
    assert cache.get(2) is not None


def test_a_grammar_that_grows_in_the_cache_counts_as_what_it_is() -> None:
    """States come to a grammar while texts follow it: with the next one, and while nothing is compiled."""
    cache, first, second = GrammarCache(100), made(10), made(10)
    cache.put("first", first, 0)
    first.compiled.num_bytes = 70  # type: ignore[misc]
    cache.put("second", second, 0)
    assert cache.num_bytes == 80
    second.compiled.num_bytes = 60  # type: ignore[misc]
    assert not cache.let_go()
    assert (cache.get("first"), cache.num_bytes) == (None, 60)
    cache.put("third", made(50), 0)
    assert (len(cache), cache.num_bytes) == (1, 50)


def test_what_is_kept_holds_no_sources(make_service: Callable[[float], GrammarService]) -> None:
    """Neither those of grammars in force nor those of refused ones, which are bounded in number only."""
    service = make_service(20)
    settle(service, service.request((json_option("{}"), outlines_option("a"))))
    settle(service, service.request((outlines_option("(" + "a" * 10_000),)))
    keys = [*service._cache._found, *service._cache._refused]
    assert [len(key) for key in keys if isinstance(key, bytes)] == [16, 16]


def test_a_grammar_counts_as_what_it_holds(make_service: Callable[[float], GrammarService]) -> None:
    """Of some words of a source a library can make megabytes, and does not say so."""
    service = make_service(240)
    start_process(service)
    schema = {"enum": [{"k": i, "v": [i]} for i in range(700)]}  # takes half a second to load with 2,000
    option = json_option(schema)
    made = service._compiler.outside(option, time.monotonic() + 240)
    assert made.num_bytes > max(2 << 20, 2 * made.grammar.num_bytes)
    found = Enforced(0, made.grammar, service._compiler.backend(option.backend))
    service._cache.put("large", found, made.num_bytes)
    assert service._cache.get("large") is None, "more than the whole bound"


def test_what_a_backend_needs_here_is_loaded_before_its_first_grammar(
    make_service: Callable[[float], GrammarService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that takes a second to import would hold up everybody's tokens, and be memory that never comes back."""
    service, loaded = make_service(20), threading.Event()
    backend = service._compiler.backend("outlines")
    load_blob = backend.load

    def noted(blob: bytes) -> CompiledGrammar:
        made = load_blob(blob)
        loaded.set()
        return made

    monkeypatch.setattr(backend, "load", noted)
    service.warm_up()
    assert loaded.wait(240)


def test_the_judge_starts_ahead_where_there_are_backends(small: Vocabulary) -> None:
    """The first text that is judged waits for no process; without backends nothing is judged."""
    plugins = load(make_plan(Registry.scan(), grammar_backend="llguidance"), "compiler")
    backend = plugins.get("grammar_backend", "llguidance")(small)
    front, none = StructuredOutputs({"llguidance": backend}), StructuredOutputs({})
    try:
        front.warm_up()
        none.warm_up()
        assert none._validator._pool._fork_server._attempt is None
        assert front._validator._pool._fork_server._attempt is not None
        front._validator._pool.wait_ready(240)
    finally:
        front.close()
        none.close()


def test_large_grammars_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody asks for any more leaves memory after a while; small ones, and what is in use, stay."""
    now = 100.0
    monkeypatch.setattr("dovetail.grammar.compile.cache.time.monotonic", lambda: now)
    cache = GrammarCache(1 << 30)
    for key, size in (("large", LARGE_BYTES), ("asked for", LARGE_BYTES), ("small", 1000)):
        cache.put(key, made(size), 0)
    assert cache.let_go()
    now += IDLE_S + 1
    cache.get("asked for")
    assert cache.let_go()  # there is another large one: come again
    assert (cache.get("large"), cache.num_bytes) == (None, LARGE_BYTES + 1000)
    now += IDLE_S + 1
    assert not cache.let_go()
    assert (cache.get("asked for"), cache.num_bytes) == (None, 1000)
    assert cache.get("small") is not None


def test_memory_is_looked_at_until_no_large_grammar_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is compiled any more."""
    monkeypatch.setattr("dovetail.grammar.compile.memory.DELAYS_S", (0.001, 0.002))
    left = [True, True, False]
    done = threading.Event()

    def let_go() -> bool:
        more = left.pop(0)
        if not more:
            done.set()
        return more

    trimmer = Trimmer(let_go)
    trimmer.soon()
    assert done.wait(30)
    trimmer.close()
    assert left == []


def test_what_took_too_long_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that ran out of time on a busy machine is refused for a while, a wrong one for good."""
    now = 100.0
    monkeypatch.setattr("dovetail.grammar.compile.cache.time.monotonic", lambda: now)
    cache = GrammarCache(100, retry_s=5)
    cache.put("slow", RejectedGrammar("no", "grammar_too_complex"), 0)
    cache.put("wrong", RejectedGrammar("no", "invalid_grammar"), 0)
    assert cache.get("slow") is not None
    now += 6
    assert cache.get("slow") is None
    assert cache.get("wrong") is not None


def test_finished_texts_are_judged_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word on a text comes from jsonschema, and a pattern that never ends gives no verdict, soon."""
    monkeypatch.setattr("dovetail.grammar.compile.pool.TIMEOUT_S", 5.0)  # the machine may be busy
    validator = FinalValidator()
    try:
        assert validator.validate('{"not": {"const": 3}}', ["3", "4", "{"]) == [False, True, False]
        assert validator.validate('{"pattern": "^(a+)+$"}', [json.dumps("a" * 40 + "b")]) == [None]
        assert validator.validate('{"type": "integer"}', ["1"]) == [True]
    finally:
        validator.close()
