"""What a body costs before anything is done with it: validation ends at the first faults, and values are counted."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from harness import Harness
from pydantic import BaseModel, ValidationError

from dovetail.contracts.errors import RequestError
from dovetail_server.apis.chat.schema import ChatRequest
from dovetail_server.apis.completions.schema import CompletionRequest
from dovetail_server.openapi.document import body_models
from dovetail_server.openapi.examples import BODIES, fill
from dovetail_server.reading.parse import FREE_OBJECTS, MAX_VALUES, check_density, parse
from dovetail_server.reading.request import PLAIN_OBJECTS
from dovetail_server.schema.fail_fast import PIECE
from dovetail_server.start import app  # noqa: F401 - registers all routes

GOOD = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
MANY = 3000
WRONG: dict[str, Any] = {
    "objects": [{}] * MANY + [1],
    "texts and a number": ["a"] * MANY + [1],
    "numbers and a text": [1] * MANY + ["a"],
    "messages of no role": [{"role": "x", "content": [{}] * 9, "unknown": 1}] * MANY,
    "lists": [[[]] * 9] * MANY,
    "an object": {f"k{i}": [i] for i in range(MANY)},
    "an object of long names": {"k" * 600 + str(i): "v" * 600 for i in range(100)},
}


def num_findings(model: type[BaseModel], body: Any) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("model", body_models(), ids=lambda model: model.__name__)
def test_no_field_collects_findings(model: type[BaseModel]) -> None:
    """Thousands of faults in any field of any body are a few findings."""
    for field in (info.alias or name for name, info in model.model_fields.items()):
        for wrong, value in WRONG.items():
            for given in (value, [value], {"type": value, "content": value}):
                assert num_findings(model, {field: given}) <= 150, (field, wrong)


@pytest.mark.parametrize("model", body_models(), ids=lambda model: model.__name__)
def test_unknown_fields_are_one_finding(model: type[BaseModel]) -> None:
    """However many fields are unknown, the first of them is named, and those that are null are none."""
    unknown = {f"unknown_{i}": i for i in range(MANY)}
    if model.model_config.get("extra") == "forbid":
        with pytest.raises(ValidationError) as caught:
            model.model_validate({"nothing": None} | unknown)
        names = [error["loc"] for error in caught.value.errors() if error["type"] == "extra_forbidden"]
        assert names == [("unknown_0",)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [*GOOD["messages"] * 700, {"role": "x", "content": "a"}, {"role": 1}]}, "messages[700].role"),
        ({"logit_bias": {**{str(i): 1.0 for i in range(700)}, "700": "x", "701": "y"}}, "logit_bias.700"),
        ({"metadata": {str(i): 1 for i in range(700)}}, "metadata"),
        ({"stop": ["a"] * 31 + [1] + [2] * 9}, "stop[31]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strikt": True, "strickt": 1}}]}, None),
    ],
)  # fmt: skip
def test_the_first_fault_is_named(fields: dict[str, Any], param: str | None) -> None:
    """Ending early changes nothing in what the reply says."""
    with pytest.raises(RequestError) as caught:
        parse(json.dumps(GOOD | fields).encode(), ChatRequest)
    assert caught.value.param == (param or "tools[0].function.strikt")


def test_many_entries_are_all_kept() -> None:
    """An object that is validated piece by piece comes out whole, in its order."""
    bias = {str(i): float(i % 7) for i in range(1000)}
    read = parse(json.dumps(GOOD | {"logit_bias": bias}).encode(), ChatRequest).logit_bias
    assert list((read or {}).items()) == list(bias.items())


@pytest.mark.parametrize("name", ["u" * 900_000, "messagesx" + "x" * 500_000])
def test_long_names_are_not_repeated(name: str) -> None:
    """What an error says of a field is short, however long its name."""
    with pytest.raises(RequestError) as caught:
        parse(json.dumps(GOOD | {name: 1}).encode(), ChatRequest)
    assert len(caught.value.message) < 400
    assert len(caught.value.param or "") < 200


@pytest.mark.parametrize(
    "body",
    [
        '{"' + "k" * 100_000 + '":[' + '"a",' * 20_000 + '"\\u0000"]}',
        '{"' + "k" * 50_000 + '":{"' + "l" * 50_000 + '":[' + '"a",' * 20_000 + '"\\u0000"]}}',
    ],
)
def test_looking_for_nul_keeps_no_paths(body: str) -> None:
    """A long name above many values is not written once for each of them."""
    raw = body.encode()
    tracemalloc.start()
    with pytest.raises(RequestError, match="holds a NUL") as caught:
        parse(raw, ChatRequest)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(raw)
    assert len(caught.value.message) < 400


DENSE = {
    "objects": b'{"model":"m","prompt":[' + b"{}," * (1 << 20) + b"1]}",
    "lists": b"[" * 2 + b"[],[" * (1 << 20),
    "objects behind a text": b'{"a":"\\"]},","b":[' + b'{"a":1},' * (1 << 19) + b"1]}",
}


@pytest.mark.parametrize("name", DENSE)
def test_a_body_of_empty_objects_is_refused_before_it_is_parsed(name: str) -> None:
    """Each costs twenty times as much memory as it has bytes: too many are a 400 that costs nothing."""
    tracemalloc.start()
    with pytest.raises(RequestError, match="may hold") as caught:
        parse(DENSE[name], CompletionRequest)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.code == "body_too_dense"
    assert peak < len(DENSE[name])


def test_values_are_bounded() -> None:
    """As many numbers as the longest context has tokens are parsed, more are not."""
    check_density(b'{"prompt":[' + b"1," * (MAX_VALUES - 10) + b"1]}")
    with pytest.raises(RequestError, match="send several requests"):
        check_density(b'{"prompt":[' + b"1," * MAX_VALUES + b"1]}")


@pytest.mark.parametrize("text", ['"{[', '\\"[,', "[[1,2],[3,4]],", "\\\\", ",,,,", "é[{"])
def test_brackets_in_texts_do_not_count(text: str) -> None:
    """A prompt may be made of anything."""
    body = {"model": "m", "prompt": text * (2 * MAX_VALUES // len(text))}
    assert parse(json.dumps(body).encode(), CompletionRequest).prompt == body["prompt"]


@pytest.mark.parametrize("end", [b"", b"\\", b"\\u", b'"', b'\\"'])
def test_a_body_that_ends_anywhere(end: bytes) -> None:
    """What is cut off in a string or behind it is no JSON, and nothing goes on for ever."""
    for raw in (b'{"a":"' + b"[" * (2 * FREE_OBJECTS) + end, b"[" * (2 * FREE_OBJECTS) + b'"' + end):
        with pytest.raises(RequestError):
            parse(raw, ChatRequest)


def test_ordinary_bodies_are_far_from_the_bounds() -> None:
    """Examples, sixty thousand messages, and a million token ids pass."""
    for examples in BODIES.values():
        for example in examples.values():
            check_density(json.dumps(fill(example, "m")).encode())
    check_density(json.dumps({"messages": GOOD["messages"] * 60_000}).encode())
    check_density(json.dumps({"prompt": [150_000] * 1_000_000}).encode())


def test_what_holds_no_prompt_may_hold_few_objects(harness: Harness) -> None:
    """It is parsed in the server's own process: 80,000 objects in 1 MB stopped the event loop for 60 ms."""
    body = {"rid": {f"k{at:07}": {"a": [1]} for at in range(PLAIN_OBJECTS)}}
    reply = harness.post("/abort_request", body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "body_too_dense")
    assert harness.post("/abort_request", {"rid": "x"}).status_code == 200


@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, 2 * PIECE])
def test_every_entry_of_a_long_list_is_checked(place: int) -> None:
    """Also where it is the first or the last of the part that is checked at once; the error has its index."""
    messages: list[Any] = [*GOOD["messages"]] * (2 * PIECE + 1)
    ChatRequest.model_validate({"model": "m", "messages": messages})
    messages[place] = {"role": "user", "content": 5}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"model": "m", "messages": messages})
    assert {error["loc"][1] for error in caught.value.errors()} == {place}
