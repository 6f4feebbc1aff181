"""What every API must do: read bodies into requests or refuse them, and write replies that do not depend on chunks."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from dovetail.contracts.api import Api, Route, ServerFacts, View
from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.replies import Failure
from dovetail.contracts.requests import Request
from dovetail.processing.apis import routes_of
from dovetail.processing.checked import checked
from dovetail_testing.checks import as_failure, check, fail, no_error, raised, shown
from dovetail_testing.conformance.base import Conformance
from dovetail_testing.replies import play, reply_of

SEEDS = range(12)
CHUNKS: Sequence[Sequence[int]] = ((1,), (2,), (3, 1, 5), (1000,))
SERVER = "dovetail_server"
NESTED: list[Any] = []
for _ in range(100):
    NESTED = [NESTED]
HOSTILE: Mapping[str, Any] = {
    "null": None,
    "a list": [],
    "a list of null": [None],
    "an object": {},
    "an object of objects": {"a": {"b": {}}},
    "a number": 3,
    "-1": -1,
    "a fraction": 0.5,
    "1e308": 1e308,
    "2**70": 1 << 70,
    "true": True,
    "a text": "x",
    "an empty text": "",
    "lists in lists": NESTED,
}
"""In place of each value of a sample."""
LARGE: Mapping[str, Any] = {"1 MB of text": "x" * (1 << 20), "100,000 numbers": [1] * 100_000}
"""In place of each field of a sample."""
MOST_PLACES = 200
FAILURE = Failure(503, 'it "ended"\nearly', "server_error", None, "ended")
FACTS = ServerFacts(
    version="1.0",
    models=("one", "two"),
    created=1_700_000_000,
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    weight_bytes=1000,
    context_len=4096,
    vocab_size=256,
    quantization="",
    template="{{ messages }}",
    calls_tools=True,
    thinks=False,
)


class RefusedError(Exception):
    """A body was refused, as it may be."""


class ApiConformance(Conformance):
    """What every API must do.

    Attributes:
        samples: Bodies that are right, by the path of their route, at least one of each route that generates. Say what
            there is to say: thinking, tools, log probabilities.
        wrong: Bodies that must be refused, by path, beside what the kit makes of the samples.
        shown: Bodies of views that are right, by path; {} where there is none.
        merging: Paths whose streams may say together what came together.
    """

    kind = "api"
    samples: ClassVar[Mapping[str, Sequence[Mapping[str, Any]]]] = {}
    wrong: ClassVar[Mapping[str, Sequence[Any]]] = {}
    shown: ClassVar[Mapping[str, Sequence[Mapping[str, Any]]]] = {}
    merging: ClassVar[Sequence[str]] = ()

    def api(self) -> Api:
        """Make the plugin as a server does."""
        with no_error("making it"):
            made: Api = self.plugin()()
        return made

    def routes(self) -> Sequence[Route | View]:
        """Return its routes."""
        with no_error("routes()"):
            return list(self.api().routes())

    def sampled(self) -> Iterator[tuple[Route, Mapping[str, Any]]]:
        """Yield each sample, with its route."""
        if not self.samples:
            pytest.skip("it has no samples; give bodies that are right, by path, in `samples` of its class")
        routes = {route.path: route for route in self.routes() if isinstance(route, Route)}
        unknown = [path for path in (*self.samples, *self.wrong) if path not in routes]
        check(not unknown, f"samples are given for {unknown}; the routes that generate are {', '.join(routes)}")
        missing = [path for path in routes if not self.samples.get(path)]
        check(not missing, f"give samples for {', '.join(missing)}, too")
        for path, bodies in self.samples.items():
            for body in bodies:
                yield routes[path], body

    def read(self, route: Route, body: Any) -> list[Request]:
        """Read a body as a server does.

        Raises:
            RefusedError: It was refused.
        """
        what = f"{route.path}: {shown(body)}"
        try:
            made = route.requests(body if route.body is None else route.body.model_validate(body))
        except RequestError as error:
            check(bool(error.message), f"{what} is refused without a message")
            raise RefusedError(error.message) from None
        except Exception as error:  # a stranger's code; the message says what it did
            if route.body is not None and type(error).__name__ == "ValidationError":
                raise RefusedError(str(error)) from None
            fail(f"read raised {raised(error)} for {what}; only RequestError is told to clients")
        check(bool(made) and all(isinstance(one, Request) for one in made), f"{what} gives {shown(made)}, no Request")
        for request in made:
            check_request(request, what)
        return made

    def right(self, route: Route, body: Any) -> list[Request]:
        """Read a body that is right."""
        try:
            return self.read(route, copy.deepcopy(body))
        except RefusedError as error:
            fail(f"{route.path}: the sample {shown(body)} is refused: {error}")

    def test_routes_are_well_formed(self) -> None:
        """What a server looks at before it starts is right: names, paths, writers, schemas, owned paths."""
        with as_failure(ValueError):
            routes_of(self.api())

    def test_reads_samples_alike_each_time(self) -> None:
        """A body makes the same requests again and again, changes nothing of it, and nothing of it is kept."""
        for route, body in self.sampled():
            first, second = self.right(route, body), self.right(route, body)
            check(first == second, f"{route.path}: {shown(body)} read twice gives different requests")
            given = Body(copy.deepcopy(body))
            made = self.right_as_it_is(route, given)
            check(given == body, f"{route.path}: read changed the body {shown(body)}")
            kept = weakref.ref(given)
            del given, made
            gc.collect()
            check(kept() is None, f"{route.path}: the body is still held after its request is gone")

    def right_as_it_is(self, route: Route, body: Any) -> list[Request]:
        """Read a body that is right, itself and no copy."""
        try:
            return self.read(route, body)
        except RefusedError as error:
            fail(f"{route.path}: the sample {shown(body)} is refused: {error}")

    def test_refuses_what_is_wrong(self) -> None:
        """What is wrong is refused with `RequestError`: `wrong`, what is no object, and a field that there is not."""
        for route, body in self.sampled():
            malformed: list[Any] = [[], 3, None, "text", True, {**body, "no_such_field": 1}]
            for wrong in (*self.wrong.get(route.path, ()), *malformed):
                try:
                    self.read(route, copy.deepcopy(wrong))
                except RefusedError:
                    continue
                fail(f"{route.path}: {shown(wrong)} is not refused; a field that is accepted must be served")

    def test_survives_hostile_values(self) -> None:
        """With any value in place of any of a sample's, it is read or refused, and a request has no wrong number."""
        for route, body in self.sampled():
            for place in list(places(body))[:MOST_PLACES]:
                self._tries(route, body, place, HOSTILE)
            for name in body:
                self._tries(route, body, (name,), LARGE)

    def _tries(self, route: Route, body: Any, place: Sequence[Any], values: Mapping[str, Any]) -> None:
        for value in values.values():
            try:
                self.read(route, replaced(body, place, copy.deepcopy(value)))
            except RefusedError as error:
                check(len(str(error)) < 100_000, f"{route.path}: a refusal of {place} repeats all of a large value")

    def test_streams_do_not_depend_on_chunks(self) -> None:
        """The bytes of a stream are the same however the engine's steps come together."""
        for route, body in self.sampled():
            requests = self.right(route, body)
            for seed in SEEDS:
                found = [self.streamed(route, requests, seed, sizes) for sizes in CHUNKS]
                again = self.streamed(route, requests, seed, CHUNKS[0])
                check(again == found[0], f"{route.path}: the same steps give another stream the second time")
                check_framing(route, found[0])
                if route.path in self.merging:
                    continue
                for sizes, stream in zip(CHUNKS, found, strict=True):
                    differs = f"{route.path}: a stream differs with steps in groups of {sizes}, for {shown(body)}"
                    check(stream == found[0], differs)

    def streamed(self, route: Route, requests: Sequence[Request], seed: int, sizes: Sequence[int]) -> bytes:
        """Return a stream."""
        reply = reply_of(requests)
        with no_error(f"{route.path}: the writer", " in a stream"):
            writer = route.writer(reply)
            made = [writer.open(), *(writer.step(group) for group in play(reply, seed, sizes)), writer.close()]
        check(all(isinstance(one, bytes) for one in made), f"{route.path}: a writer returned no bytes: {shown(made)}")
        return b"".join(made)

    def test_whole_replies_are_folds(self) -> None:
        """A whole reply is JSON, and the same however the steps came."""
        for route, body in self.sampled():
            requests = self.right(route, body)
            for seed in SEEDS:
                found = [self.whole(route, requests, seed, s, m) for s in CHUNKS for m in (False, True)]
                check_json(found[0], f"{route.path}: a whole reply")
                check(len(set(found)) == 1, f"{route.path}: a whole reply depends on the steps' groups, {shown(body)}")

    def whole(self, route: Route, requests: Sequence[Request], seed: int, sizes: Sequence[int], merges: bool) -> bytes:
        """Return a whole reply."""
        reply = reply_of(requests)
        with no_error(f"{route.path}: the writer", " for a whole reply"):
            writer = route.writer(reply)
            for group in play(reply, seed, sizes, merges=merges):
                writer.take(group)
            return writer.whole()

    def test_requests_travel_between_processes(self) -> None:
        """A request that went through JSON, as from the process that reads large bodies, is answered alike."""
        for route, body in self.sampled():
            requests = self.right(route, body)
            travelled = msgspec.json.decode(msgspec.json.encode(requests), type=list[Request])
            for seed in SEEDS[:3]:
                same = self.streamed(route, travelled, seed, (1,)) == self.streamed(route, requests, seed, (1,))
                check(same, f"{route.path}: the reply is another once the request was sent to another process")

    def test_errors_are_told(self) -> None:
        """A stream ends with what went wrong; on its own paths an error has a status and a JSON body."""
        for route in self.routes():
            if isinstance(route, Route):
                failure_body = self._failure_body(route.path, route.writer.failed)
                check(
                    isinstance(failure_body, bytes) and b"early" in failure_body,
                    f"{route.path}: failed() leaves out the message",
                )
                check_framing(route, failure_body)
        if self.plugin().owns:
            status, body = self._failure_body("the API", self.api().failed)
            check(isinstance(status, int) and 400 <= status < 600, f"failed() gives the status {status!r}")
            check("early" in json.dumps(msgspec.to_builtins(body)), "failed() leaves out the message")

    def test_failures_are_told_where_they_are_noted(self) -> None:
        """A writer that takes note of a failure tells of it at the end of the stream, and in the whole reply."""
        for route, body in self.sampled():
            reply = reply_of(self.right(route, body))
            with no_error(f"{route.path}: the writer", " after a failure"):
                writer = route.writer(reply)
                made = writer.open() + writer.step(next(play(reply, 0, (1,))))
                if not writer.fail(FAILURE):
                    continue
                whole, end = writer.whole(), writer.close()
            check(b"early" in end and b"early" in whole, f"{route.path}: close() or whole() leaves out the failure")
            check_framing(route, made + end)

    def _failure_body(self, what: str, failed: Callable[[Failure, str | None], Any]) -> Any:
        try:
            check(failed(FAILURE, None) is not None, f"{what}: failed() returns nothing where there is no request id")
            return failed(FAILURE, "req-1")
        except NotImplementedError:
            fail("it owns paths and has no failed(), which tells of their errors")
        except Exception as error:  # a stranger's code; the message says what it did
            fail(f"{what}: failed() raised {raised(error)}")

    def test_views_show_json(self) -> None:
        """A view returns JSON, changes no body, and refuses with `RequestError`."""
        for view in self.routes():
            if not isinstance(view, View):
                continue
            right = list(self.shown.get(view.path, ({},) if view.method == "GET" else ()))
            for body in right:
                given = copy.deepcopy(dict(body))
                check(self._shows(view, given) is not None, f"{view.path}: {shown(body)} is refused")
                check(given == body, f"{view.path}: show changed the body")
                for place in places(body):
                    for value in HOSTILE.values():
                        self._shows(view, replaced(body, place, copy.deepcopy(value)))
            self._shows(view, {"no_such_field": NESTED})

    def _shows(self, view: View, body: dict[str, Any]) -> bytes | None:
        try:
            made = msgspec.json.encode(view.show(FACTS, body))
        except RequestError:
            return None
        except Exception as error:  # a stranger's code; the message says what it did
            fail(f"{view.path}: show raised {raised(error)} for {shown(body)}")
        check(made[:1] == b"{", f"{view.path}: show gave {shown(made)}, no object")
        return made

    def test_does_not_know_the_server(self) -> None:
        """Importing it imports nothing of the server's, which no plugin can rely on: contracts have all."""
        if self.planned().target.startswith(SERVER):
            pytest.skip("it is the server's own")
        known = [name for name in self._child().heavy_alone if name == SERVER]
        check(not known, f"importing it imports {SERVER}; what an API needs is in dovetail.contracts")


class Body(dict[str, Any]):
    """A body that can be told to be gone."""


def check_request(request: Request, what: str) -> None:
    """Fail unless a request can be served: it can be sent, has a prompt, and its numbers are within bounds."""
    check(bool(request.prompts), f"{what} gives a request without prompts")
    with as_failure(Exception, f"{what} gives a request that cannot be sent to another process: "):
        sent = msgspec.json.encode(request)
        again = msgspec.json.encode(msgspec.json.decode(sent, type=Request))
    same = json.loads(again) == json.loads(sent)
    check(same, f"{what} gives a request that is another once it was sent to another process")
    try:
        checked([request], what)
    except PluginError as error:
        fail(str(error))
    except RequestError as error:
        fail(f"{what} gives what no request may have, and the core refuses ({error}); read must refuse it")


def check_framing(route: Route, stream: bytes) -> None:
    """Fail unless a stream, or its end, has the form that its media type promises."""
    kind = route.writer.media_type
    if kind == "application/x-ndjson":
        check(stream.endswith(b"\n"), f"{route.path}: a line of the stream does not end with a newline")
        for line in stream.splitlines():
            check_json(line, f"{route.path}: a line of the stream")
    elif kind == "text/event-stream":
        check(stream.endswith(b"\n\n"), f"{route.path}: an event does not end with an empty line")
        known = (b"data:", b"event:", b"id:", b"retry:", b":")
        odd = [line for line in stream.split(b"\n") if line and not line.startswith(known)]
        check(not odd, f"{route.path}: {shown(odd[:1])} is no line of an event")


def check_json(text: bytes, what: str) -> None:
    """Fail unless a text is JSON."""
    try:
        json.loads(text)
    except ValueError as error:
        fail(f"{what} is no JSON: {raised(error)}: {shown(text)}")


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the ways to all values in a body, but to the body itself."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inner:
        yield (*place, key)
        yield from places(item, (*place, key))


def replaced(body: Any, place: Sequence[Any], value: Any) -> Any:
    """Return a copy of a body with another value at a place."""
    made = copy.deepcopy(body if not isinstance(body, Mapping) else dict(body))
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return made
