"""Structured outputs of the offline `LLM`, and random schemas end to end."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import RequestError
from dovetail_offline.requests import fields_of


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[1, 2]


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(reasoning_parser="qwen3", max_total_tokens=16384, device="cpu") as made:
        yield made


ASKED = [{"role": "user", "content": "Anna is 36 years old. Give the name and age as JSON."}]


def text(llm: LLM, **params: Any) -> str:
    [reply] = llm.chat([ASKED], SamplingParams(max_tokens=100, seed=1, **params), use_tqdm=False)
    assert reply.finish_reason == "stop", reply.message
    assert reply.grammar is not None
    assert reply.grammar.valid is True
    return reply.text


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"ebnf": 'root ::= "x" "y"'}, "xy"),
        ({"json_schema": {"enum": ["é", "b"]}}, '"(é|b)"'),
        ({"structured_outputs": {"choice": ["l", "r"]}}, "l|r"),
        ({"output_type": Literal["left", "right"]}, "left|right"),
        ({"output_type": Colour}, "red|blue"),
        ({"output_type": ["p", "q"]}, "p|q"),
        ({"output_type": bool}, "true|false"),
        ({"output_type": "[0-9]{2}"}, "[0-9]{2}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_way_to_ask(llm: LLM, params: dict[str, Any], pattern: str) -> None:
    """Fields and Python types constrain the text."""
    assert re.fullmatch(pattern, text(llm, **params))


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_within_forced_text(llm: LLM, keep: bool) -> None:
    """The reply ends at the stop string, and so do the tokens that count, though the grammar forced more at once."""
    params = SamplingParams(
        regex="(yes|no), thank you very much for asking", stop="ery", include_stop_str_in_output=keep
    )
    [reply] = llm.generate("x", params, use_tqdm=False)
    assert re.fullmatch("(yes|no), thank you v" + "(ery)" * keep, reply.text)
    assert (reply.finish_reason, reply.matched_stop) == ("stop", "ery")
    [*before, _] = reply.token_ids
    assert "ery" in llm.tokenizer.decode(reply.token_ids, skip_special_tokens=True)
    assert "ery" not in llm.tokenizer.decode(before, skip_special_tokens=True)


def test_pydantic_models(llm: LLM) -> None:
    """The text of a model's type is one of its instances."""
    Person.model_validate_json(text(llm, output_type=Person))


def test_outlines_types(llm: LLM) -> None:
    """Types of `outlines.types` are understood: regex, choice, schema, grammar and terms made of them."""
    types = pytest.importorskip("outlines.types")
    assert fields_of(types.Regex("[ab]")) == {"regex": "[ab]"}
    assert re.fullmatch("[xy]{2}", text(llm, output_type=types.Regex("[xy]{2}")))
    assert text(llm, output_type=types.Choice(["one", "two"])) in ("one", "two")
    assert json.loads(text(llm, output_type=types.JsonSchema({"enum": [1, 2]}))) in (1, 2)
    assert text(llm, output_type=types.CFG('start: "a" "b"')) == "ab"
    either = types.Regex("q") | types.Regex("z")
    assert text(llm, output_type=either) in ("q", "z")


def test_what_is_wrong_is_refused(llm: LLM) -> None:
    """Two grammars, and a type that stands for none, are errors that name the field."""
    for params in ({"regex": "a", "output_type": int}, {"regex": "a", "ebnf": "b"}, {"output_type": object()}):
        with pytest.raises(RequestError):
            llm.generate("x", SamplingParams(**params), use_tqdm=False)


def test_a_backend_for_one_request(llm: LLM) -> None:
    """Beside others that take what is chosen for them; an unknown one is refused."""
    params = [SamplingParams(max_tokens=9, regex="[ab]{3}", grammar_backend=name) for name in ("outlines", None)]
    found = [reply.grammar.backend for reply in llm.generate(["x", "x"], params, use_tqdm=False) if reply.grammar]
    assert found == ["outlines", "llguidance"]
    with pytest.raises(RequestError, match="none-such"):
        llm.generate("x", SamplingParams(regex="a", grammar_backend="none-such"), use_tqdm=False)


def test_a_refusal_names_the_place(llm: LLM) -> None:
    """As over HTTP."""
    part = {"type": "integer", "minimum": 3, "maximum": 2}
    given = {"type": "object", "properties": {"n": part}, "required": ["n"]}
    [reply] = llm.generate("x", SamplingParams(json_schema=given), use_tqdm=False)
    assert reply.finish_reason == "abort"
    assert "/properties/n" in str(reply.message)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({1: None}, "must be JSON: its key 1 is no text; write it as a string"),
        ({"enum": [{"a": ({None: 1},)}]}, "must be JSON: its key None is no text; write it as a string"),
        ({"const": float("nan")}, "must be JSON: Out of range float values are not JSON compliant"),
    ],
)
@pytest.mark.parametrize("field", ["json_schema", "structured_outputs"])
def test_a_schema_that_json_cannot_say_is_refused(llm: LLM, field: str, schema: Any, said: str) -> None:
    """With the key or the value: a number as a key was written as a text, and constrained nothing."""
    given = {"json_schema": schema} if field == "json_schema" else {field: {"json": schema}}
    param = {"json_schema": "json_schema", "structured_outputs": "structured_outputs.json"}[field]
    with pytest.raises(RequestError) as caught:
        llm.generate("x", SamplingParams(max_tokens=1, **given), use_tqdm=False)
    assert caught.value.message == f"prompt 0: {param} {said}"
