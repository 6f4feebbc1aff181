"""A server answers every request at and beyond the bounds of its fields as it did."""

from __future__ import annotations

import json
from pathlib import Path

import answers
import pytest
from bodies import Body, Field, all_requests, bounds, changed, field_of, mutations

HOW = (
    "`python tests/guards/answers.py --changed` prints the answers that differ. If they are wanted, "
    "`answers.py --write` signs them, and a fragment of docs/changelog.d says what clients see."
)


@pytest.mark.parametrize("part", ["few", pytest.param("all", marks=pytest.mark.full)])
def test_answers_are_those_on_record(part: str, tmp_path: Path) -> None:
    """Of each route neither what is answered nor what is said differs."""
    record = json.loads(answers.RECORD.read_text("utf-8"))
    if record["environment"] != answers.environment():
        pytest.skip(f"messages depend on versions: on record are answers of {record['environment']}")
    found = answers.by_route(answers.answers(tmp_path, only_few=part == "few"))
    assert set(found) == set(record[part]), HOW
    for number, what in enumerate(("what is answered", "what is said")):
        differing = [route for route, digests in found.items() if digests[number] != record[part][route][number]]
        assert not differing, f"{what} differs: {', '.join(differing)}. {HOW}"


def test_requests_are_of_every_route_and_have_names_of_their_own() -> None:
    """Some thousands, and each body with a route has its good request."""
    names = [asked.name for asked in all_requests()]
    assert len(names) == len(set(names)) == json.loads(answers.RECORD.read_text("utf-8"))["num"] > 3000
    assert {"POST /v1/rerank as it should be", "GET /v1/models with no body"} <= set(names)


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        ("integer 1..128 | null = null", {"at least": 1, "beyond least": 0, "at most": 128, "beyond most": 129}),
        ("number >0..2", {"at least": 0.0, "beyond most": 2.001}),
        ("string len 1..3", {"under least": "", "at most": "aaa", "over most": "aaaa"}),
        ("array len ..2 | null", {"over most": [1, 1, 1]}),
        ('"a" | "b", required', {'"a"': "a", '"b", 1': "b", "no such value": "no-such-value", "left out": ...}),
        ("object names ..1", {"over most": {"a0": 1, "a1": 1}}),
    ],
)
def test_each_bound_is_tried_from_both_sides(facts: str, wanted: dict[str, object]) -> None:
    """At, under and over each length and number; each value, and another; nothing, where something is required."""
    found = {name: value for kind, name, value in mutations(Body(), field_of("x", facts)) if kind == "bound"}
    assert {name: found[name] for name in wanted} == wanted


def test_a_value_is_put_where_its_path_says() -> None:
    """Into lists, branches and objects, beside what these require."""
    body = Body()
    for path, facts in (
        ("messages", "array len 1..9, required"),
        ("messages[]", "object"),
        ("messages[].role", '"user", required'),
        ("messages[].parts[]<text>.type", '"text", required'),
    ):
        body.fields[path] = field_of(path, facts)
    put = changed(body, {"model": "m"}, Field("messages[].parts[]<text>.text", ("string",), False), "x")
    assert put == {"model": "m", "messages": [{"role": "user", "parts": [{"type": "text", "text": "x"}]}]}
    assert changed(body, {}, body.fields["messages[].role"], ...) == {"messages": [{}]}
    assert bounds("integer -9..-3") == (-9, -3)


def test_an_answer_tells_what_the_engine_was_asked() -> None:
    """A change of what is asked shows, one of an identifier does not; a refusal is code, type, field and message."""
    from dovetail.messages import SamplerParams, Submit

    one, other = (Submit(rid=rid, prompt_ids=[1], params=SamplerParams(max_tokens=1)) for rid in "ab")
    more = Submit(rid="a", prompt_ids=[1], params=SamplerParams(max_tokens=2))
    assert answers.told(200, "x", [one]) == answers.told(200, "x", [other]) != answers.told(200, "x", [more])
    error = {"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}
    assert answers.told(400, json.dumps(error), []) == "400 code=c type=t param=p message=m"
