"""The kit names the faults of APIs: each of these has one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from dovetail.contracts.api import Api, Route, ServerFacts, View
from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import ContentDelta
from dovetail.contracts.replies import Failure, Reply, StepView, Writer
from dovetail.contracts.requests import Request, Sampling, Text
from dovetail_testing import check_class, conformance_class

encode = msgspec.json.encode
ASKED = {"text": "Once", "temperature": 0.5, "tags": {"a": [1]}, "deep": True}
ATTRS: dict[str, Any] = {
    "samples": {"/tell": [ASKED, {"text": "a"}]},
    "wrong": {"/tell": [{}, {"text": ""}]},
    "shown": {"/told": [{"name": "one"}]},
}


class Writes(Writer):
    media_type = "application/x-ndjson"
    keep_alive = b""

    def step(self, steps: Sequence[StepView]) -> bytes:
        said = [event.text for step in steps for event in step.events if isinstance(event, ContentDelta)]
        return b"".join([encode(text) + b"\n" for text in said])

    def whole(self) -> bytes:
        return encode({"text": self.reply.choices[0].text})

    @classmethod
    def failed(cls, failure: Failure, request_id: str | None) -> bytes:
        return encode({"error": failure.message}) + b"\n"


class Right(Api):
    """An API without faults."""

    owns: ClassVar[tuple[str, ...]] = ("/tell",)
    writer: ClassVar[type[Writer]] = Writes
    name: ClassVar[str] = "tell"

    def routes(self) -> Sequence[Route | View]:
        return (
            Route(name=self.name, path="/tell", about="Go on with a text.", read=self.read, writer=self.writer),
            View(name="told", path="/told", about="Who asks.", show=self.show, method="POST"),
        )

    def read(self, body: Any) -> Request:
        if not isinstance(body, dict) or body.keys() - {"text", "temperature", "tags", "deep"}:
            raise RequestError("a text and a temperature are all that there is", param="text")
        text, temperature = body.get("text"), body.get("temperature")
        if not isinstance(text, str) or not text:
            raise RequestError("text must be a text", param="text")
        if temperature is not None and (not isinstance(temperature, float) or not 0 <= temperature <= 2):
            raise RequestError("temperature must be between 0.0 and 2.0", param="temperature")
        return Request(prompts=[Text(text=text)], sampling=Sampling(temperature=temperature), logprobs=1)

    def show(self, facts: ServerFacts, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("name") not in facts.models:
            raise RequestError("there is no such name", param="name", status=404)
        return {"name": body["name"]}

    def failed(self, failure: Failure, request_id: str | None) -> tuple[int, Any]:
        return failure.status, {"error": failure.message}


def writing(**changes: Any) -> type[Api]:
    """Return the API with another writer."""
    return type("Faulty", (Right,), {"writer": type("FaultyWriter", (Writes,), changes)})


def faulty(**changes: Any) -> type[Api]:
    """Return the API with other parts."""
    return type("Faulty", (Right,), changes)


class BadName(Right):
    name = "tell me"


class Counts(Right):
    number = itertools.count()

    def read(self, body: Any) -> Request:
        return msgspec.structs.replace(super().read(body), reply={"number": next(self.number)})


class Pops(Right):
    def read(self, body: Any) -> Request:
        made = super().read(body)
        body.pop("temperature", None)
        return made


class Keeps(Right):
    kept: ClassVar[list[Any]] = []

    def read(self, body: Any) -> Request:
        self.kept.append(body)
        return super().read(body)


class Ignores(Right):
    def read(self, body: Any) -> Request:
        known = ("text", "temperature")
        return super().read({k: v for k, v in body.items() if k in known} if isinstance(body, dict) else body)


class Trusts(Right):
    def read(self, body: Any) -> Request:
        made = super().read({"text": body["text"]} if isinstance(body, dict) and "text" in body else body)
        given = body.get("temperature")
        return msgspec.structs.replace(made, sampling=Sampling(temperature=given if type(given) is float else None))


class Deep(Right):
    def read(self, body: Any) -> Request:
        if isinstance(body, dict):
            body.get("tags", {}).get("a", [0])[0] + 1
        return super().read(body)


class Sends(Right):
    def read(self, body: Any) -> Request:
        return msgspec.structs.replace(super().read(body), reply={"seen": object()})


class Half(Right):
    def read(self, body: Any) -> Request:
        return msgspec.structs.replace(super().read(body), reply={"pair": (1, 2)})


class Pairs(Writes):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.tells = isinstance(reply.requests[0].reply["pair"], tuple)

    def open(self) -> bytes:
        return b'"pair"\n' if self.tells else b""


def joined(self: Writes, steps: Sequence[StepView]) -> bytes:
    said = "".join([event.text for step in steps for event in step.events if isinstance(event, ContentDelta)])
    return encode(said) + b"\n" if said else b""


def last_seen(self: Writes, steps: Sequence[StepView]) -> None:
    self.seen = len(steps)  # type: ignore[attr-defined]


def tells_last(self: Writes) -> bytes:
    return encode({"steps": self.seen})  # type: ignore[attr-defined]


def notes(self: Writes, failure: Failure) -> bool:
    return True


ALIKE, CHUNKS = "test_reads_samples_alike_each_time", "test_streams_do_not_depend_on_chunks"
WHOLE, WRONG = "test_whole_replies_are_folds", "test_refuses_what_is_wrong"
HOSTILE, ERRORS = "test_survives_hostile_values", "test_errors_are_told"
NO_MESSAGE = classmethod(lambda cls, failure, request_id: b'{"error": true}\n')
FAULTS: dict[str, tuple[type[Api], str, str]] = {
    "a name with a space": (BadName, "test_routes_are_well_formed", "use letters, digits and _"),
    "counts": (Counts, ALIKE, "read twice gives different requests"),
    "changes the body": (Pops, ALIKE, "read changed the body"),
    "keeps bodies": (Keeps, ALIKE, "is still held after its request is gone"),
    "ignores fields": (Ignores, WRONG, "a field that is accepted must be served"),
    "trusts numbers": (Trusts, HOSTILE, "read must refuse it"),
    "trusts types": (Deep, HOSTILE, "only RequestError is told to clients"),
    "not to be sent": (Sends, ALIKE, "cannot be sent to another process"),
    "joins what came together": (writing(step=joined), CHUNKS, "a stream differs with steps in groups of"),
    "no lines": (writing(step=lambda self, steps: b"a\n"), CHUNKS, "is no JSON"),
    "a whole reply of the last steps": (
        writing(take=last_seen, whole=tells_last),
        WHOLE,
        "depends on the steps' groups",
    ),
    "a failure that is noted and not told": (
        writing(fail=notes),
        "test_failures_are_told_where_they_are_noted",
        "close() or whole() leaves out the failure",
    ),
    "a whole reply that is none": (writing(whole=lambda self: b"text"), WHOLE, "a whole reply is no JSON"),
    "another reply elsewhere": (
        type("Faulty", (Half,), {"writer": Pairs}),
        "test_requests_travel_between_processes",
        "the reply is another",
    ),
    "no message": (writing(failed=NO_MESSAGE), ERRORS, "failed() leaves out the message"),
    "errors of its own without words": (faulty(failed=Api.failed), ERRORS, "it owns paths and has no failed()"),
    "an error that is none": (faulty(failed=lambda *_: (200, {})), ERRORS, "gives the status 200"),
    "a view that trusts": (
        faulty(show=lambda self, facts, body: {"name": body["name"].upper()}),
        "test_views_show_json",
        "show raised",
    ),
}


def test_a_right_api_passes() -> None:
    """The API that the faults are made from has none."""
    report = check_class(conformance_class("api", plugin_class=Right, **ATTRS))
    assert report.passed, report.text()


@pytest.mark.first(5)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_an_apis_fault(fault: str, caught: Callable[..., None]) -> None:
    """An API with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    caught("api", plugin, test, message, select=test, **ATTRS)
