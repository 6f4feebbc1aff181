"""What compilations may cost: time from the request on, memory, and how many may wait."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import msgspec
import pytest
import requests
from grammar_demo import json_option
from served import ASK, Served
from test_service import ENDLESS, outlines_option, pids_of, settle, start_process

from dovetail.base.forks import ForkServer, send
from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarLimits, GrammarSpec, Kind, Vocabulary
from dovetail.grammar.compile import child
from dovetail.grammar.compile.cache import Enforced, RejectedGrammar
from dovetail.grammar.compile.child import try_out
from dovetail.grammar.compile.jobs import CompileFuture, QueueBounds, Workers
from dovetail.grammar.compile.pool import START_S, ChildTimeoutError
from dovetail.grammar.compile.service import GrammarService
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.grammar.spec.refusals import BUSY, FULL, OWNER_FULL, TOO_COMPLEX
from dovetail.grammar.spec.relax import lightened
from dovetail.grammar.spec.wire import ChildJob, ChildReply
from dovetail.messages import GrammarOption
from dovetail.plugins import Registry, load, make_plan

Make = Callable[..., GrammarService]


@pytest.fixture
def make_service(small: Vocabulary) -> Iterator[Make]:
    """Make services over the small vocabulary, without xgrammar, which imports torch in each one's process."""
    made: list[GrammarService] = []
    plugins = load(make_plan(Registry.scan(deny=["dovetail-llm:xgrammar"]), grammar_backend="auto"), "engine")

    def make(timeout_s: float, **bounds: int) -> GrammarService:
        limits = QueueBounds(**bounds)
        service = GrammarService(plugins, lambda: small, timeout_s=timeout_s, cache_bytes=1 << 24, bounds=limits)
        made.append(service)
        return service

    yield make
    for service in made:
        service.close()


def spec(schema: Any) -> GrammarSpec:
    return GrammarSpec(kind=Kind.JSON, source=json.dumps(schema))


COSTLY = {
    "a large divisor": {"type": "integer", "multipleOf": 1_000_003},
    "a divisor with decimals": {"type": "number", "multipleOf": 0.000_123_457},
    "a product of alternatives": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(9)]} for i in range(8)]
    },
    "a product behind references": {
        "$defs": {"a": {"anyOf": [{"minimum": i} for i in range(40)]}},
        "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}],
    },
    "many properties": {"properties": {f"p{i}": {} for i in range(600)}},
    "nested repetitions": {"pattern": "^(((a{1,90}b){1,90}c){1,90})$"},
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_may_be_costly_is_not_compiled_in_the_engine(small: Vocabulary, name: str) -> None:
    """llguidance answers `inline` by a bound of the cost, not by the size of the source; usual schemas pass."""
    plan = make_plan(Registry.scan(), grammar_backend="llguidance")
    backend = load(plan, "compiler").get("grammar_backend", "llguidance")(small)
    assert not backend.inline(spec(COSTLY[name]))
    usual = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^a{1,5}$"} for i in range(50)}}
    assert backend.inline(spec(usual))


def test_a_costly_compilation_ends_at_its_limit_outside_the_engine(make_service: Make) -> None:
    """An automaton of five million states, and one of a million: each is refused in time, and the engine's own
    memory does not grow by it."""
    service = make_service(2.0)
    start_process(service)
    began = time.monotonic()
    futures = [service.request((json_option({"type": "integer", "multipleOf": n}),)) for n in (5_000_011, 9_000_011)]
    for future in futures:
        refused = settle(service, future)
        assert isinstance(refused, RejectedGrammar)
        assert refused.code == TOO_COMPLEX
    assert time.monotonic() - began < 30  # the limit is 2 s; the machine may be busy
    assert pids_of(service) == []


def test_the_last_way_has_time_where_others_take_too_long(make_service: Make) -> None:
    """Any JSON is enforced rather than nothing; what took too long is not tried again with less of it."""
    service = make_service(3.0)
    start_process(service)
    slow = {"type": "integer", "multipleOf": 5_000_011}
    steps = (
        json_option(slow),
        json_option(slow, relax_schema=True),
        json_option({**slow, "minimum": 1}),
        json_option({"type": "integer"}),
    )
    outcome = settle(service, service.request(steps))
    assert isinstance(outcome, Enforced)
    assert outcome.option == 3


def test_the_last_way_has_grace(make_service: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any JSON takes next to no time, so it is enforced also where the ways before have left none."""
    service = make_service(1.0)
    settle(service, service.request((json_option({"type": "null"}),)))
    start_process(service)
    asked: list[GrammarOption] = []

    def outside(step: GrammarOption, deadline: float) -> NoReturn:
        asked.append(step)
        time.sleep(max(0.0, service._timeout_s + 0.1))
        raise ChildTimeoutError

    monkeypatch.setattr(service._compiler, "outside", outside)
    slow = json_option({"type": "integer", "multipleOf": 5_000_011})
    outcome = settle(service, service.request((slow, json_option({"type": "integer"}))))
    assert isinstance(outcome, Enforced)
    assert (outcome.option, asked) == (1, [slow])


def test_waiting_for_the_first_process_counts(make_service: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is told in its time that there is no process yet; that one goes on starting, and serves the next."""
    service, goes_on, load = make_service(0.5), threading.Event(), ForkServer.load

    def slow(self: ForkServer, start: object) -> None:
        assert goes_on.wait(60)
        load(self, start)  # type: ignore[arg-type]

    monkeypatch.setattr(ForkServer, "load", slow)
    monkeypatch.setattr("dovetail.grammar.compile.service.START_S", 1.0)
    steps = (GrammarOption(backend="outlines", kind="regex", source="[ab]{3}"),)
    outcome = settle(service, service.request(steps))
    assert isinstance(outcome, RejectedGrammar)
    assert outcome.code == BUSY
    assert "still starting" in outcome.message
    inline = settle(service, service.request((*steps, json_option({"type": "integer"}))))
    assert isinstance(inline, Enforced), "the last way needs no process"
    service._timeout_s = 600.0
    goes_on.set()
    assert isinstance(settle(service, service.request(steps)), Enforced)


def test_what_needs_no_process_does_not_wait_long_for_the_first(
    make_service: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile schema right after the start is answered in its time, without the keyword that costs so much."""
    service, goes_on, load = make_service(5.0), threading.Event(), ForkServer.load

    def slow(self: ForkServer, start: object) -> None:
        assert goes_on.wait(120)
        load(self, start)  # type: ignore[arg-type]

    monkeypatch.setattr(ForkServer, "load", slow)
    settle(service, service.request((json_option({"type": "null"}),)))
    hostile = json_option({"type": "integer", "multipleOf": 5_000_011})
    weaker = msgspec.structs.replace(hostile, relax_schema=True)
    began = time.monotonic()
    steps = (hostile, outlines_option(ENDLESS), weaker, json_option({"type": "integer"}))
    outcome = settle(service, service.request(steps))
    assert time.monotonic() - began < START_S / 2
    goes_on.set()
    assert isinstance(outcome, Enforced)
    assert (outcome.option, outcome.ignored) == (2, ("/multipleOf",))


def test_a_grammar_that_came_before_the_vocabulary_is_not_told_that_others_are_in_its_way(make_service: Make) -> None:
    """Its time passed while tokens were read: the last way, which takes none, is tried all the same."""
    service = make_service(0.2)
    make, service._compiler.make_vocabulary = service._compiler.make_vocabulary, lambda: (time.sleep(0.5), make())[1]
    steps = (json_option({"type": "integer", "multipleOf": 5_000_011}), json_option({"type": "integer"}))
    found = settle(service, service.request(steps))
    assert isinstance(found, Enforced)
    assert found.option == 1


def test_starting_a_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's time runs from when it was sent, however long its process took to come: on a busy machine, seconds."""
    timers: list[float] = []
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(signal, "setitimer", lambda _, seconds: timers.append(seconds))

    def work(job: ChildJob) -> ChildReply:
        timers.append(job.timeout_s)
        return ChildReply()

    for ago in (4.0, 9.0):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            job = ChildJob(option=json_option({"type": "null"}), timeout_s=5.0, sent=time.monotonic() - ago)
            send(ours, job)
            child._serve(theirs, ChildJob, work)
    assert all(0 < seconds <= 1.0 for seconds in timers)
    assert len(timers) == 4


def test_masks_that_would_hold_everybody_up_are_refused(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand forced characters make each mask cost thousands of usual ones; a few make no difference."""
    plan = make_plan(Registry.scan(), grammar_backend="llguidance")
    backend = load(plan, "compiler").get("grammar_backend", "llguidance")(small)
    monkeypatch.setattr(child, "MAX_MASK_S", 0.001)  # on a fast machine; those of usual grammars take 0.05 ms
    for num in (10, 100_000):
        made = backend.compile(GrammarSpec(kind=Kind.REGEX, source=f"a{{{num}}}"), GrammarLimits())
        grammar = backend.load(made) if isinstance(made, bytes) else made
        if num == 10:
            try_out(grammar, small)
            continue
        with pytest.raises(RequestError, match="mask takes more than") as caught:
            try_out(grammar, small)
        assert caught.value.code == TOO_COMPLEX


def test_trying_out_ends_once_masks_are_known_to_be_slow(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second for each of sixteen masks would be most of a grammar's time."""
    filled: list[int] = []

    class Slow:
        error = None

        def fill(self, mask: Any, row: int) -> bool:
            filled.append(row)
            mask[row] = -1
            return True

        def accept(self, ids: Sequence[int]) -> int:
            return len(ids)

    class Grammar:
        num_bytes = 0

        def matcher(self) -> Any:
            return Slow()

    monkeypatch.setattr("dovetail.grammar.compile.child.time.process_time", lambda: float(len(filled)))
    with pytest.raises(RequestError, match="mask takes more than"):
        try_out(Grammar(), small)
    assert len(filled) == 1


def test_a_costly_source_is_built_once_before_its_process_answers(
    small: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance's form of it travels; loading it shows what building it costs."""
    plan = make_plan(Registry.scan(), grammar_backend="llguidance")
    backend = load(plan, "compiler").get("grammar_backend", "llguidance")(small)
    num_built = 0
    build = backend._build  # type: ignore[attr-defined]

    def counted(*given: Any) -> Any:
        nonlocal num_built
        num_built += 1
        return build(*given)

    monkeypatch.setattr(backend, "_build", counted)
    blob = backend.compile(spec(COSTLY["many properties"]), GrammarLimits())
    assert isinstance(blob, bytes)
    backend.load(blob)
    assert num_built == 1


SLOW = {"type": "integer", "multipleOf": 1_000_003}


def all_slow(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that needs a process is ready in time."""

    def outside(step: GrammarOption, deadline: float) -> NoReturn:
        raise ChildTimeoutError

    monkeypatch.setattr(service._compiler, "outside", outside)


def test_what_takes_too_long_goes_without_its_costliest_keyword(
    make_service: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else that a schema says is enforced, and what is not is named."""
    service = make_service(5.0)
    start_process(service)
    all_slow(service, monkeypatch)
    given = {"type": "object", "properties": {"n": SLOW, "c": {"enum": ["a"]}}, "required": ["n", "c"]}
    steps = (json_option(given), json_option(given, relax_schema=True), json_option({"type": "object"}))
    outcome = settle(service, service.request(steps))
    assert isinstance(outcome, Enforced)
    assert (outcome.option, outcome.ignored) == (1, ("/properties/n/multipleOf",))


def test_a_costly_keyword_does_not_drop_a_tools_schema(make_service: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are held to the rest of it, the report names the keyword's place, and they are judged."""
    service = make_service(5.0)
    start_process(service)
    all_slow(service, monkeypatch)
    plugins = load(make_plan(Registry.scan(), tool_parser="hermes", grammar_backend="auto"), "api")
    nothing = Vocabulary(tokens=(), size=256, eos_ids=frozenset(), special_ids=frozenset(), fingerprint="")
    front = StructuredOutputs({p.name: backend(nothing) for p, backend in plugins.candidates("grammar_backend")})
    parameters = {"type": "object", "properties": {"n": SLOW, "city": {"enum": ["Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    parser = plugins.get("tool_parser", "hermes")()
    route = front.tools(parser, "hermes", [tool], "required", parallel=False, param="tools")
    front.close()
    outcome = settle(service, service.request(route.engine_options))
    assert isinstance(outcome, Enforced)
    assert route.needs_validation(outcome.option, outcome.ignored)
    enforcement, ignored = route.options[outcome.option].with_left_out(outcome.ignored)
    assert (enforcement, ignored) == ("approximate", ("/tools/0/function/parameters/properties/n/multipleOf",))


NOT_LIGHTER = ("a product of alternatives", "a product behind references")
"""What is cheap by itself, and costly together."""


@pytest.mark.parametrize("name", COSTLY)
def test_costly_schemas_become_cheap_without_few_keywords(small: Vocabulary, name: str) -> None:
    """Of backends that know what is cheap; of others nothing is known."""
    plugins = load(make_plan(Registry.scan(), grammar_backend="auto"), "compiler")
    found = lightened(plugins.get("grammar_backend", "llguidance")(small), spec(COSTLY[name]))
    if found is not None:
        assert 1 <= len(found[1]) <= 64
    assert (found is None) == (name in NOT_LIGHTER)
    assert lightened(plugins.get("grammar_backend", "outlines")(small), spec(COSTLY[name])) is None


def test_waiting_counts(make_service: Make) -> None:
    """A grammar that waited all its time for others is told to come again, and is not remembered as too complex."""
    service = make_service(600.0)
    start_process(service)
    hanging = [service.request((outlines_option(f"{ENDLESS}{end}"),)) for end in "xy"]
    while len(pids_of(service)) < 2:
        service.wait(0.05)
    held = threading.Event()
    service._swift.put("", lambda: held.wait(60))  # neither is there one for what is done soon
    service._timeout_s = 0.5
    late = (outlines_option("[gh]{2}"),)
    future = service.request(late)
    time.sleep(0.7)
    for pid in pids_of(service):
        os.kill(pid, signal.SIGKILL)
    held.set()
    refused = settle(service, future)
    assert isinstance(refused, RejectedGrammar)
    assert refused.code == BUSY
    assert all(isinstance(settle(service, each), RejectedGrammar) for each in hanging)
    service._timeout_s = 600
    assert isinstance(settle(service, service.request(late)), Enforced)


def test_plain_grammars_do_not_wait_behind_hard_ones(make_service: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all that may take its time is taken; a hard one more waits for its turn there, and gets it."""
    service = make_service(600.0)
    start_process(service)
    hanging = [service.request((outlines_option(f"{ENDLESS}{end}"),)) for end in "xy"]
    while len(pids_of(service)) < 2:
        service.wait(0.05)
    monkeypatch.setattr("dovetail.grammar.compile.service.SWIFT_S", 0.0)
    third = service.request((outlines_option("[gh]{3}"),))
    while not len(service._outside):
        service.wait(0.05)
    monkeypatch.setattr("dovetail.grammar.compile.service.SWIFT_S", 300.0)
    for letters in ("ab", "cd", "ef"):
        assert isinstance(settle(service, service.request((outlines_option(f"[{letters}]{{2}}"),))), Enforced)
    assert not any(future.is_ready for future in (*hanging, third))
    for pid in pids_of(service):
        os.kill(pid, signal.SIGKILL)
    assert isinstance(settle(service, third), Enforced)


def test_what_waits_is_bounded_per_owner_and_in_all(make_service: Make) -> None:
    """One owner too many, then all together too many; who joins a grammar that is under way always may."""
    service = make_service(600.0, max_waiting=3, max_of_owner=2)
    held = threading.Event()
    for _ in range(2):
        service._inline.put("", lambda: held.wait(60))  # its threads are busy
    steps = [(json_option({"const": i}),) for i in range(9)]
    first = [service.request(steps[i], "a") for i in range(2)]
    assert outcome(service, steps[2], "a") == OWNER_FULL
    assert service.request(steps[1], "a") is first[1]
    third = service.request(steps[3], "b")
    assert outcome(service, steps[4], "c") == FULL
    assert len(service._pending) == 3
    held.set()
    assert all(isinstance(settle(service, future), Enforced) for future in (*first, third))
    assert not service._pending
    assert isinstance(settle(service, service.request(steps[2], "a")), Enforced)
    assert not service._waiting.num


def outcome(service: GrammarService, steps: Any, owner: str) -> str | None:
    """The code of a refusal at once."""
    future = service.request(steps, owner)
    assert isinstance(future.outcome, RejectedGrammar)
    return future.outcome.code


def test_bytes_that_wait_are_bounded(make_service: Make) -> None:
    """A few large sources fill the queue as many small ones do."""
    service = make_service(600.0, max_bytes_of_owner=3000)
    held = threading.Event()
    for _ in range(2):
        service._inline.put("", lambda: held.wait(60))
    service.request((json_option({"const": "x" * 2000}),), "a")
    assert outcome(service, (json_option({"const": "y" * 2000}),), "a") == OWNER_FULL
    held.set()


def test_what_nobody_waits_for_is_not_compiled(make_service: Make) -> None:
    """Claims that are given back before a thread was free end the job."""
    service = make_service(600.0)
    held = threading.Event()
    for _ in range(2):
        service._inline.put("", lambda: held.wait(60))
    steps = (json_option({"const": 1}),)
    future, same = service.request(steps), service.request(steps)
    service.release(future)
    service.release(same)
    held.set()
    refused = settle(service, future)
    assert isinstance(refused, RejectedGrammar)
    assert isinstance(settle(service, service.request(steps)), Enforced)


def test_who_comes_while_a_job_is_given_up_is_served(make_service: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one that waited for a grammar has left, and another asks for it in the moment that this is seen."""
    service = make_service(600.0)
    steps, joined = (json_option({"const": 1}),), []
    finish = service._finish

    def late(*args: Any) -> None:
        if not joined:
            joined.append(service.request(steps))
        finish(*args)

    held = threading.Event()
    for _ in range(2):
        service._inline.put("", lambda: held.wait(60))
    service.release(service.request(steps))
    monkeypatch.setattr(service, "_finish", late)
    held.set()
    while service._pending:
        service.wait(0.05)
    monkeypatch.undo()
    assert isinstance(settle(service, (joined or [service.request(steps)])[0]), Enforced)


def test_a_backend_that_raises_anywhere_fills_the_future(make_service: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose future is never filled would wait without end, and so would all others without a thread."""
    service = make_service(600.0)
    settle(service, service.request((json_option({"type": "null"}),)))
    start_process(service)
    service._timeout_s = 0.3
    good, backend = service._compiler.backend("llguidance"), service._compiler.backend

    class Broken:
        def inline(self, spec: GrammarSpec) -> bool:
            raise RuntimeError("a fault of a plugin")

    def outside(step: GrammarOption, deadline: float) -> NoReturn:
        time.sleep(service._timeout_s + 0.1)
        raise ChildTimeoutError

    monkeypatch.setattr(service._compiler, "outside", outside)
    monkeypatch.setattr(service._compiler, "backend", lambda name: Broken() if name == "broken" else backend(name))
    slow = json_option({"type": "integer", "multipleOf": 5_000_011})
    last = GrammarOption(backend="broken", kind="json", source="{}")
    for at in range(3):  # more than there are threads
        refused = settle(service, service.request((slow, msgspec.structs.replace(last, source=f'{{"const":{at}}}'))))
        assert isinstance(refused, RejectedGrammar)
    service._timeout_s = 600.0
    assert good.inline(spec({"type": "integer"}))
    assert isinstance(settle(service, service.request((json_option({"type": "integer"}),))), Enforced)


def test_owners_take_turns() -> None:
    """One owner's many items do not delay another's one by more than one."""
    done: list[str] = []
    workers = Workers("none", 0)
    for number in range(5):
        workers.put("a", partial(done.append, f"a{number}"))
    workers.put("b", partial(done.append, "b0"))
    while len(workers) and (work := workers.take()) is not None:
        work()
    assert done == ["a0", "b0", "a1", "a2", "a3", "a4"]
    workers.close()
    assert workers.take() is None


@pytest.mark.parametrize(("code", "status"), [(FULL, 503), (BUSY, 503), (OWNER_FULL, 429)])
def test_a_full_queue_is_told_over_http(
    served: Served, code: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply says that it is not the grammar's fault, and when to come again."""
    refused = CompileFuture(RejectedGrammar("too many; try again later", code))
    monkeypatch.setattr(GrammarService, "request", lambda *_, **__: refused)
    body = {"model": "dovetail-demo", "messages": ASK, "regex": "a+"}
    for stream in (False, True):
        reply = requests.post(f"{served.base}/v1/chat/completions", json={**body, "stream": stream}, timeout=60)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        assert int(reply.headers["retry-after"]) > 0
